"""transformers' image classifiers: read from their config.json, built, and saved by transformers itself.

Names in memory and names in files differ from version to version; both ways, the conversion is the library's own.
Code that a repository brings along is never run.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_retarget.errors import ModelError
from hf_retarget.files import move_durably, write_json
from hf_retarget.models.build import seeded
from hf_retarget.models.config import Description, check_images, read_labels
from hf_retarget.models.image_processor import (
    PREPROCESSOR,
    compose_processor,
    describe_images,
    read_processor,
)
from hf_retarget.models.shape import TooLargeError, keep_fields
from hf_retarget.models.weights import most_common_dtype

_PROCESSOR = "preprocessor"
"""Where a description keeps preprocessor_config.json as it was."""

_ASIDE = (
    *("architectures", "id2label", "label2id", "num_labels", "model_type", "transformers_version", "dtype"),
    *("torch_dtype", "problem_type", "initializer_range", "finetuning_task", "return_dict", "auto_map"),
)
"""Entries of a configuration that do not decide about the function of a model, or that are kept elsewhere."""


class TransformersLibrary:
    """How transformers saves image classifiers."""

    companions: tuple[str, ...] = (PREPROCESSOR,)
    tells_all = True

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """transformers names `architectures`; timm has one, also where transformers wraps it."""
        return not isinstance(raw.get("architecture"), str) and ("model_type" in raw or "architectures" in raw)

    def describe(self, raw: Mapping[str, Any], folder: Path, where: str, arch: str | None = None) -> Description:
        """What config.json and preprocessor_config.json say."""
        if arch is not None:
            raise ModelError(f"'{where}' holds a transformers model, which says what it is; leave out --arch")
        named = raw.get("architectures")
        named = [named] if isinstance(named, str) else named
        kind, name = raw.get("model_type"), named[0] if isinstance(named, list) and named else None
        transformers = _import(where, kind or name)
        names = _classifiers(str(kind))
        if not names:
            own = " with code of its own, which is not run" if "auto_map" in raw else ""
            raise ModelError(
                f"'{where}' holds a transformers model of type '{kind}'{own}; "
                "it is none of transformers' image classifiers, and only those can be ported"
            )
        # A base may come without a classifier, as ViTModel: it is read as a classifier of no classes.
        headed = name in names
        try:
            with _quiet():
                known = transformers.CONFIG_MAPPING[kind]
                config = known.from_dict({**keep_fields(raw, known, where), **({} if headed else {"num_labels": 0})})
        except ModelError:
            raise
        except Exception as error:  # whatever the configuration's own checks raise
            raise ModelError(f"config.json in '{where}' is no configuration of '{kind}': {error}") from error
        labels = read_labels(raw) if headed else None
        images = check_images(_images(config, processor := read_processor(folder)), where, PREPROCESSOR)
        images |= {_PROCESSOR: processor} if processor else {}
        return _description(str(name) if headed else names[0], config, labels, images)

    def describe_model(self, model: nn.Module) -> Description | None:
        """A model that transformers built, if its configuration tells all about it."""
        library = sys.modules.get("transformers")  # nobody has such a model without having imported it
        if library is None or not isinstance(model, library.PreTrainedModel):
            return None
        config: Any = model.config
        name = next(each.__name__ for each in type(model).__mro__ if each.__module__.startswith("transformers."))
        if name not in _classifiers(config.model_type):
            return None
        carried = getattr(model, "pretrained_cfg", None)
        about = _description(name, config, read_labels(config.to_dict()), carried or _images(config, None))
        again = self.build(about, empty=True).state_dict()
        same = {key: each.shape for key, each in again.items()} == {k: e.shape for k, e in model.state_dict().items()}
        return about if same else None

    def build(self, about: Description, *, empty: bool = False, seed: int = 0) -> nn.Module:
        """A model that answers with a tensor of logits; all else is transformers' own."""
        from accelerate import init_empty_weights

        kind, config = self._configure(about)
        with ExitStack() as stack:
            stack.enter_context(_quiet())
            stack.enter_context(seeded(seed))
            if empty:
                stack.enter_context(init_empty_weights(include_buffers=False))
            try:
                model: Any = kind(config)
            except TooLargeError:
                raise
            except Exception as error:  # whatever the constructor of the model raises
                raise ModelError(f"'{about.architecture}' cannot be built: {type(error).__name__}: {error}") from error
        model.__class__ = _answering(kind)
        model.pretrained_cfg = {key: value for key, value in about.config.items() if key != _PROCESSOR}
        return model  # type: ignore[no-any-return]

    def convert(self, weights: Mapping[str, Tensor], about: Description) -> dict[str, Tensor] | None:
        """As `from_pretrained` renames them; None if some are missing, or left over although there is a classifier."""
        kind, config = self._configure(about)
        hollow = any(tensor.is_meta for tensor in weights.values())
        options = {"device_map": "meta"} if hollow else {}
        try:
            with _quiet():
                model, report = kind.from_pretrained(
                    None,
                    config=config,
                    state_dict=dict(weights),
                    output_loading_info=True,
                    dtype=most_common_dtype(weights),
                    **options,
                )
        except Exception:  # tensors that transformers was not prepared for: anything may happen
            return None
        wrong = report["missing_keys"] or report["mismatched_keys"] or report["error_msgs"]
        if wrong or (report["unexpected_keys"] and about.num_classes):
            return None
        return dict(model.state_dict())

    def write(self, folder: Path, weights: dict[str, Tensor], about: Description, model: nn.Module) -> None:
        """config.json, model.safetensors and preprocessor_config.json, each at once."""
        kind, config = self._configure(about)
        if about.labels:
            config.id2label = dict(enumerate(about.labels))
            config.label2id = {label: number for number, label in config.id2label.items()}
        folder.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(dir=folder, prefix=".saving."))
        try:
            with _quiet():
                from accelerate import init_empty_weights

                with init_empty_weights(include_buffers=False):
                    plain = kind(config).to(most_common_dtype(weights))  # which config.json says, too
                plain.save_pretrained(hidden, state_dict=weights)
            for path in sorted(hidden.iterdir()):
                move_durably(path, folder / path.name)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        if processor := compose_processor(about.config.get(_PROCESSOR), about.config):
            write_json(folder / PREPROCESSOR, processor)

    def _configure(self, about: Description) -> tuple[Any, Any]:
        """The class, and a configuration of its own for so many classes."""
        kind = getattr(_import(about.architecture, about.architecture), about.architecture)
        return kind, kind.config_class(**dict(about.options), num_labels=about.num_classes or 0)


def _description(name: str, config: Any, labels: tuple[str, ...] | None, images: dict[str, Any]) -> Description:
    options = {key: value for key, value in config.to_diff_dict().items() if key not in _ASIDE and key[0] != "_"}
    return Description(name, options, config.num_labels, labels, images, "transformers")


def _images(config: Any, processor: dict[str, Any] | None) -> dict[str, Any]:
    try:
        return describe_images(processor, getattr(config, "num_channels", 3), getattr(config, "image_size", None))
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{PREPROCESSOR} is malformed: {error!r}; save the image processor again") from error


def _import(where: str, kind: object) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"'{where}' holds a transformers model ({kind!r}), and transformers is not installed: "
            "pip install 'hf-retarget[transformers]'"
        ) from error
    return transformers


def _classifiers(model_type: str) -> tuple[str, ...]:
    """The image classifiers that transformers has for a type of models, the usual one first."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as NAMES

    # timm's models have a configuration of their own, which is read as timm's; ShieldGemma is a language model.
    found = () if model_type in ("timm_wrapper", "shieldgemma2") else NAMES.get(model_type, ())
    return (found,) if isinstance(found, str) else tuple(found)


@cache
def _answering(kind: type[nn.Module]) -> type[nn.Module]:
    """The same class, but images are answered with logits, and it says what timm's models say of themselves."""

    def forward(self: Any, pixel_values: Tensor) -> Tensor:
        logits: Tensor = kind.forward(self, pixel_values=pixel_values).logits
        return logits

    def get_classifier(self: Any) -> list[nn.Module]:
        """The layers after the backbone that have as many outputs as there are classes."""
        inside = set(getattr(self, self.base_model_prefix, nn.Identity()).modules())
        return [
            module
            for module in self.modules()
            if module not in inside
            and getattr(module, "weight", None) is not None
            and _outputs(module) == self.num_classes
        ]

    own = {
        "forward": forward,
        "get_classifier": get_classifier,
        "num_classes": property(lambda self: self.config.num_labels),
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), own)


def _outputs(module: nn.Module) -> int | None:
    outputs = getattr(module, "out_features", getattr(module, "out_channels", None))
    return outputs if isinstance(outputs, int) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' lines and bars: what is to be said is said here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()

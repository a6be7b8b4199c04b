"""Which files of a finished folder go to the Hub: those that this package writes, and nothing else."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from hf_retarget.errors import PublishError
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_json

CONFIG, WEIGHTS, INDEX, CARD = "config.json", "model.safetensors", "model.safetensors.index.json", "README.md"

KNOWN = (
    CONFIG,
    WEIGHTS,
    INDEX,
    "model-*-of-*.safetensors",
    CARD,
    "preprocessor_config.json",
    "port.json",
    "finetune.json",
    "recipe.yaml",
    "permutation.safetensors",
    "initial_head.safetensors",
    "graph.json",
    "report.html",
    "figures/*.png",
    "figures/*.svg",
    "plane/plane.*",
)
"""Everything that belongs to a finished port or fine-tuning."""

TRAJECTORY = "trajectory/*"
"""Large, and of use only to those who port along it: only if asked for."""


SAMPLES = ("report.html", "figures/samples.*")
"""What shows images of the data: if those are not on the Hub themselves, only if asked for."""


def list_contents(
    folder: str | Path, *, trajectory: bool = False, samples: bool = False
) -> tuple[dict[str, Path], list[str]]:
    """The files of a finished folder that are pushed, by their paths there, and the names of what is left out."""
    place = Path(folder)
    _check_finished(place)
    patterns = (*KNOWN, *((TRAJECTORY,) if trajectory else ()))
    secret = SAMPLES if not samples and shows_private_images(place) else ()
    files, left_out = {}, []
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place).as_posix()
        hidden = any(part.startswith(".") for part in Path(name).parts)
        if path.is_symlink():  # what it leads to may be anything on this machine
            raise PublishError(f"'{name}' in '{folder}' is a link; put the file itself there, or remove the link")
        if hidden or not path.is_file():
            continue
        if fits(name, patterns) and not fits(name, secret):
            files[name] = path
        else:
            left_out.append(name)
    return files, left_out


def fits(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path is one of those; a star does not reach into folders.

    Example:
        >>> fits("figures/curve.png", ("figures/*.png",)), fits("a/figures/curve.png", ("*/*.png",))
        (True, False)
    """
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def shows_private_images(folder: Path) -> bool:
    """Whether a port shows images of a dataset that did not come from the Hub (or whose origin cannot be told).

    Example:
        >>> shows_private_images(Path("no-port"))
        False
    """
    try:
        document = read_json(folder / "port.json", MAX_DOCUMENT_BYTES)
        return bool(document.get("samples")) and document["inputs"]["data"]["revision"] is None
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True


def list_weights(files: dict[str, Path]) -> list[str]:
    """Those of the files that hold the weights.

    Example:
        >>> list_weights({"config.json": Path("config.json"), "model.safetensors": Path("model.safetensors")})
        ['model.safetensors']
    """
    return [WEIGHTS] if WEIGHTS in files else [name for name in files if fnmatch(name, "model-*-of-*.safetensors")]


def _check_finished(folder: Path) -> None:
    if not folder.is_dir():
        raise PublishError(f"there is no folder '{folder}'; name one that 'hf-retarget port' or 'finetune' has made")
    if re.fullmatch(r"\..+\.(work|tmp)", folder.resolve().parent.name):
        raise PublishError(f"'{folder}' is the work of a run that is not finished; go on with --resume, then push")
    needed = (CONFIG, INDEX if (folder / INDEX).is_file() else WEIGHTS)
    if missing := next((name for name in needed if not (folder / name).is_file()), None):
        raise PublishError(
            f"'{folder}' is no finished model: there is no {missing} in it; "
            "name a folder that 'hf-retarget port' or 'finetune' has made"
        )
    try:
        read_json(folder / CONFIG)
        for path in _weight_files(folder):
            read_names(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PublishError(f"'{folder}' is damaged: {' '.join(str(error).split())}; make it again") from error


def _weight_files(folder: Path) -> list[Path]:
    if not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    shards = read_json(folder / INDEX)["weight_map"].values()
    return [folder / Path(name).name for name in sorted(set(shards))]


def read_names(path: Path) -> list[str]:
    """The names of the tensors in a file; raises OSError if it is not whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "np") as file:  # torch would take seconds to import, and only names are read
            return sorted(file.keys())
    except SafetensorError as error:
        raise OSError(f"{path.name} is not a whole safetensors file ({error})") from error

"""Writing adapters: what a port adds to its new base, as a LoRA adapter for that base.

Linear layers and plain convolutions become two factors, by a truncated singular value decomposition. Heads, norms with
their statistics and other modules without submodules are saved in full. Tensors that belong to a module with submodules
(a position embedding, a class token) cannot be held by an adapter, and are reported.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_retarget.adapters.reading import PREFIX, import_peft
from hf_retarget.document import AdapterFacts
from hf_retarget.errors import ModelError, NotFiniteError, PortError
from hf_retarget.files import write_json, write_tensors
from hf_retarget.models import Checkpoint
from hf_retarget.models.weights import find_not_finite
from hf_retarget.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hf_retarget.recipe import PortOptions

_PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_RANK = 16
_FEW = 0.25
"""Maximum share of the layers' numbers that is saved in full to make the other layers agree on having biases."""
_WHOLE = 1 - 1e-7
"""Share of the energy that counts as all of it, given the precision of float32."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter: its configuration, its stored tensors, and facts about it."""

    config: dict[str, Any]
    weights: dict[str, Tensor] = field(repr=False)
    facts: AdapterFacts

    def save(self, folder: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors, with reproducible bytes."""
        write_tensors(folder / ADAPTER_WEIGHTS, self.weights, {"format": "pt"})
        write_json(folder / ADAPTER_CONFIG, self.config)

    def load(self, model: nn.Module) -> nn.Module:
        """Load the adapter onto a model with PEFT; PortError if PEFT reads a different adapter."""
        peft = import_peft("an adapter is to be loaded")
        with tempfile.TemporaryDirectory(prefix="hf-retarget-") as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.save(Path(place))
            try:
                loaded: nn.Module = peft.PeftModel.from_pretrained(model, place)
                found = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
            except Exception as error:  # whatever PEFT raises
                raise PortError(f"PEFT cannot load the adapter: {error}; save the model (--save-as model)") from error
        if found.keys() != self.weights.keys():
            odd = sorted(found.keys() ^ self.weights.keys())[0]
            raise PortError(f"PEFT reads the adapter differently ('{odd}'); save the model (--save-as model)")
        return loaded.eval()


@dataclass
class _Parts:
    """Modules that are factored, saved in full or left out, by name."""

    factored: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)
    bare: list[str] = field(default_factory=list)
    """Tensors an adapter cannot hold."""


def check_adapter(model: nn.Module, options: PortOptions, head: Collection[str], input_size: tuple[int, ...]) -> None:
    """Refuse early if no adapter can be made for this model."""
    if options.save_as != "lora":
        return
    import_peft("--save-as lora writes a PEFT adapter")
    names = {name.rpartition(".")[0] for name in head}
    layers = [name for name in _find_called(model, input_size) if name not in names]
    shapes = {name: model.get_parameter(f"{name}.weight").shape for name in layers}
    ranks = {name: min(shape[0], shape[1:].numel()) for name, shape in shapes.items()}
    if not ranks:
        raise ModelError("the model has no linear layer or plain convolution except its head; leave out --save-as")
    name, most = max(sorted(ranks.items()), key=lambda each: each[1])
    if options.rank is not None and options.rank > most:
        raise ModelError(f"no layer has a rank of {options.rank}: '{name}' has the highest, {most}; lower --rank")


def compose_adapter(
    base: Checkpoint,
    weights: Mapping[str, Tensor],
    model: nn.Module,
    head: Collection[str],
    options: PortOptions,
    input_size: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> Adapter:
    """Express the difference between weights and a base as an adapter; `model` has the architecture of the weights.

    With `rank`, layers keep at most this many directions; with `energy`, the fewest with this share of their energy.
    """
    before = base.in_float32()
    delta = {
        name: new - old if (old := before.get(name)) is not None and old.shape == new.shape else new
        for name, new in weights.items()
        if new.is_floating_point()
    }
    changed = {name for name, each in delta.items() if each.any()}
    parts = _divide(model, changed, head, _find_called(model, input_size))
    biased = all(getattr(each, "bias", None) is not None for each in parts.factored.values())
    backbone = {name for name, _ in model.named_parameters()} - set(head)
    energies = {name: float(delta[name].double().square().sum()) for name in backbone}
    lost = {name: energies.get(name, 0.0) for name in parts.bare}
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    cut = 0.0
    for name in parts.factored:
        down, up, missing = _factor(delta[f"{name}.weight"], options)
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        ranks[name], cut = len(down), cut + missing
        if (bias := delta.get(f"{name}.bias")) is not None and biased:
            tensors[f"{name}.lora_B.bias"] = bias
        elif bias is not None and bias.any():
            lost[f"{name}.bias"] = energies[f"{name}.bias"]
    for name, module in parts.whole.items():
        tensors |= {f"{name}.{each}": weights[f"{name}.{each}"] for each in module.state_dict()}
    stored = {PREFIX + name: _stored(name, tensor, dtype) for name, tensor in tensors.items()}
    total = sum(energies.values())
    usual = _RANK if options.energy is None else Counter(ranks.values()).most_common(1)[0][0]
    rank = options.rank or usual
    facts = AdapterFacts(
        rank=rank,
        energy=max(0.0, 1 - (cut + sum(lost.values())) / total) if total else 1.0,
        layers=len(ranks),
        whole=tuple(parts.whole),
        left_out={name: each / total if total else 0.0 for name, each in lost.items()},
        size=sum(each.numel() * each.element_size() for each in stored.values()),
    )
    return Adapter(_configure(base, model, parts, rank, ranks, biased), stored, facts)


def _find_called(model: nn.Module, input_size: tuple[int, ...]) -> set[str]:
    """The layers whose `forward` is called; where only the weights are used, factors would have no effect."""
    called: set[str] = set()
    plain = {name: each for name, each in model.named_modules() if _is_plain(each)}
    hooks = [each.register_forward_hook(lambda *_, name=name: called.add(name)) for name, each in plain.items()]
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *input_size, device=next(model.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
    return called


def _divide(model: nn.Module, changed: set[str], head: Collection[str], called: set[str]) -> _Parts:
    """Decide which modules are factored, saved in full or left out."""
    parts, modules = _Parts(), {name: each for name, each in model.named_modules() if name}
    names, state = {name.rpartition(".")[0] for name in head}, model.state_dict()
    for name, module in {"": model, **modules}.items():
        own = [each for each in state if each.rpartition(".")[0] == name]
        moved = [each for each in own if each in changed]
        single = bool(name) and len(own) == len(module.state_dict())
        if name not in names and moved and name in called:
            parts.factored[name] = module
        elif single and (moved or name in names):
            parts.whole[name] = module
        else:
            parts.bare += moved
    _settle_biases(parts)
    # PEFT matches the ends of names: `norm` also selects `fc_norm`.
    for name, module in modules.items():
        if name not in parts.whole and any(name.endswith(each) for each in parts.whole):
            parts.whole[name] = module
            for inside in [each for each in (*parts.whole, *parts.factored) if each.startswith(f"{name}.")]:
                parts.whole.pop(inside, None)
                parts.factored.pop(inside, None)
            parts.factored.pop(name, None)
            parts.bare = [each for each in parts.bare if not each.startswith(f"{name}.")]
    if not parts.factored:  # PEFT requires one: use the smallest, with zero factors
        free: dict[str, Any] = {n: modules[n] for n in sorted(called) if not _is_inside(n, parts.whole)}
        name = min(free, key=lambda each: int(free[each].weight.numel()))
        parts.factored[name] = free[name]
    return parts


def _settle_biases(parts: _Parts) -> None:
    """Save the layers with biases, or those without, in full if they are few: an adapter has biases for all or none."""
    sizes = {name: each.weight.numel() for name, each in parts.factored.items()}
    biased = {name for name, each in parts.factored.items() if each.bias is not None}
    few = min(biased, parts.factored.keys() - biased, key=lambda names: sum(sizes[each] for each in names))
    if sum(sizes[each] for each in few) <= _FEW * sum(sizes.values()):
        parts.whole |= {name: parts.factored.pop(name) for name in sorted(few)}


def _is_inside(name: str, whole: Collection[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in whole)


def _is_plain(module: Any) -> bool:
    """Whether PEFT's factors act like a change of the weight, which subclasses need not respect."""
    if type(module) not in _PLAIN or {*module.state_dict()} - {"weight", "bias"}:
        return False
    if isinstance(module, nn.Linear):
        return True
    dilated = any(each != 1 for each in module.dilation)
    return bool(module.groups == 1 and not dilated and module.padding_mode == "zeros")


def _factor(delta: Tensor, options: PortOptions) -> tuple[Tensor, Tensor, float]:
    """Factor a change of weights into down and up; also returns the energy that is lost."""
    left, values, right = torch.linalg.svd(delta.flatten(1), full_matrices=False)
    energies = values.double().square()
    if options.energy is None:
        rank = min(options.rank or _RANK, len(values))
    else:
        rank = 1 + int((energies.cumsum(0) < min(options.energy, _WHOLE) * energies.sum()).sum())
    scales = values[:rank].sqrt()
    down = (scales[:, None] * right[:rank]).reshape(rank, *delta.shape[1:])
    up = (left[:, :rank] * scales).reshape(len(delta), rank, *(1 for _ in delta.shape[2:]))
    return down, up, float(energies[rank:].sum())


def _stored(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kept = tensor.detach().cpu().to(dtype or torch.float32) if tensor.is_floating_point() else tensor.detach().cpu()
    if find_not_finite({name: kept}):
        raise NotFiniteError(f"'{name}' of the adapter holds NaN or infinite numbers, or too large ones for {dtype}")
    return kept.contiguous().clone()


def _configure(
    base: Checkpoint, model: nn.Module, parts: _Parts, rank: int, ranks: Mapping[str, int], biased: bool
) -> dict[str, Any]:
    """Build adapter_config.json; alpha is the rank, so that nothing is scaled."""
    other = {f"^{name}": each for name, each in ranks.items() if each != rank}
    meant = [
        name
        for name, _ in model.named_modules()
        if name not in ranks and any(name.endswith(f".{each}") for each in ranks) and not _is_inside(name, parts.whole)
    ]
    return {
        "peft_type": "LORA",
        "peft_version": version("peft"),
        "base_model_name_or_path": base.hub_id or Path(base.reference).name,  # of a path, only the last part
        "revision": base.revision,
        "task_type": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": other,
        "alpha_pattern": other,
        "lora_bias": biased,
        "bias": "none",
        "target_modules": list(ranks),
        "exclude_modules": meant or None,
        "modules_to_save": list(parts.whole),
    }

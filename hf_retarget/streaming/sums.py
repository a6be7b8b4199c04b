"""How each tensor of a streamed port is computed from those of three models, and what rules a port out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_retarget.document import RelationFacts
from hf_retarget.errors import ModelError, NotFiniteError
from hf_retarget.models.relation import RELATED, measure_relation
from hf_retarget.models.transformers_models import acts
from hf_retarget.models.weights import FLOATS, KINDS, StoredTensor, describe_differences
from hf_retarget.names import SIDES
from hf_retarget.streaming.repository import HEAD_ENTRIES, Repository
from hf_retarget.words import plural

Sides = Mapping[str, Repository]
"""source, tuned and target."""

BLOCK = 1 << 19
"""Numbers of a tensor held in memory at once, per model."""
_SAMPLE, _SAMPLES = 1 << 13, 1 << 22
"""Numbers sampled to measure the relation: from one tensor, and in total."""
_PREFIXES = 100  # more than any library has
_NAMED = 8
"""Maximum number of tensors or tokens named in a note."""


@dataclass(frozen=True)
class Sum:
    """One tensor of the result: numbers that are summed, followed by numbers copied from one model."""

    name: str
    kind: str
    """The dtype of its numbers, as safetensors names it."""
    shape: tuple[int, ...]
    parts: tuple[StoredTensor | None, StoredTensor | None, StoredTensor | None]
    """The tensors of the old base, the tuned model and the new base."""
    common: int
    """Count of numbers that are summed."""
    rest: str = "target"
    """The model from which the remaining numbers are copied."""

    @property
    def others(self) -> StoredTensor:
        """The tensor from which the remaining numbers are copied."""
        found = self.parts[tuple(SIDES).index(self.rest)]
        assert found is not None
        return found

    @property
    def numbers(self) -> int:
        """Count of its numbers."""
        return torch.Size(self.shape).numel()

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.numbers * FLOATS[self.kind].itemsize if self.kind in FLOATS else self.others.size

    def taken(self, side: str) -> Sum:
        """The same tensor, copied from one model."""
        return replace(self, common=0, rest=side)

    def compute(self, alpha: float, update: float) -> Iterator[Tensor]:
        """Its numbers in blocks: (1 − update) · old + update · new + alpha · (tuned − old), computed in float32."""
        if self.kind not in FLOATS:
            yield self.others.read()
            return
        for start in range(0, self.common, BLOCK):
            old, tuned, new = (self._widen(each, start, self.common) for each in self.parts if each)
            base = torch.lerp(old, new, update) if update < 1 else new
            yield self._narrow(base.add_(tuned.sub_(old), alpha=alpha))
        for start in range(self.common, self.numbers, BLOCK):
            yield self._narrow(self._widen(self.others, start, self.numbers))

    def _widen(self, stored: StoredTensor, start: int, end: int) -> Tensor:
        wide = torch.float64 if any(each and each.kind == "F64" for each in self.parts) else torch.float32
        return stored.read(start, min(BLOCK, end - start)).to(wide)

    def _narrow(self, numbers: Tensor) -> Tensor:
        found = numbers.to(FLOATS[self.kind])
        if found.sum().isfinite() or found.isfinite().all():  # a sum of finite numbers may overflow
            return found
        if numbers.isfinite().all():
            raise NotFiniteError(
                f"'{self.name}' gets numbers up to {float(numbers.abs().max()):.3g}, too large for "
                f"{FLOATS[self.kind]}; store it with --dtype bfloat16 or float32"
            )
        raise self.broken()

    def broken(self) -> NotFiniteError:
        """An error that names the file with NaN or infinite numbers."""
        broken = (part.path for part in self.parts if part and not all(map(_is_finite, _read_blocks(part))))
        where = next((f"'{path}'" for path in broken), "the sum")
        return NotFiniteError(f"'{self.name}' holds NaN or infinite numbers in {where}; the model is broken")


def _is_finite(block: Tensor) -> bool:
    return bool(block.isfinite().all())


def _read_blocks(stored: StoredTensor) -> Iterator[Tensor]:
    count = stored.numbers if stored.kind in FLOATS else stored.size
    return (stored.read(start, min(BLOCK, count - start)) for start in range(0, count, BLOCK))


@dataclass(frozen=True, eq=False)
class SumPlan:
    """All tensors of a result, and notes about them."""

    sides: Sides
    sums: tuple[Sum, ...]
    notes: tuple[str, ...] = ()
    rows: int | None = None
    """Size of the result's vocabulary, if any."""

    @property
    def summed(self) -> tuple[str, ...]:
        """Names of the summed matrices, from which the relation of the bases is measured."""
        return tuple(each.name for each in self.sums if each.common and len(each.shape) > 1)


# ---- from headers alone


def find_batchnorm(sides: Sides) -> str:
    """Describe the first model with BatchNorm layers; empty if there is none."""
    found = ((side, name) for side, each in sides.items() for name in each.tensors if name.endswith("running_mean"))
    return next((f"the {SIDES[side]} has BatchNorm layers ('{name}')" for side, name in found), "")


def plan_sums(sides: Sides, dtype: str | None = None) -> SumPlan:
    """Plan a port from the headers of three models; ModelError if none is possible."""
    sides = {side: _align(each, sides["tuned"].tensors) for side, each in sides.items()}
    old, tuned, new = sides.values()
    sums, own, fixed = [], [], []
    wrong, left_out = list[str](), list[str]()
    names = [*tuned.tensors, *(name for name in new.tensors if name not in tuned.tensors)]
    for name in (each for each in names if not each.endswith("num_batches_tracked")):  # some formats leave them out
        parts = (_find(old, name, sides), _find(tuned, name, sides), _find(new, name, sides))
        kind = _choose_kind(parts, new.kind, dtype)
        if parts[1] is None:
            if parts[0] is None and parts[2] is not None and _LAYER.search(name):
                wrong.append(name)
            elif parts[0] is None and parts[2] is not None:  # for example a position table
                fixed.append(name)
                sums.append(Sum(name, kind, parts[2].shape, parts, 0))
            else:  # a replaced head may be missing, but not a part of an existing block
                block = name.rsplit(".", 2)[0]
                (wrong if any(each.startswith(f"{block}.") for each in tuned.tensors) else left_out).append(name)
        elif parts[0] is None and parts[2] is None:
            own.append(name)
            sums.append(Sum(name, kind, parts[1].shape, parts, 0, "tuned"))
        elif None in parts or (found := _fit(name, kind, parts, sides)) is None:
            wrong.append(name)
        else:
            sums.append(found)
    added = sum(each.common for each in sums)
    if wrong or 2 * added < sum(each.numbers for each in tuned.tensors.values() if each.kind in FLOATS):
        raise _differ(sides, wrong or own)
    notes = [*tuned.notes]
    notes += [f"{_list(own)} only in the tuned model: copied from it"] if own else []
    notes += [f"{_list(fixed)} only in the new base: kept"] if fixed else []
    notes += [f"{_list(left_out)} only in the bases: left out"] if left_out else []
    rows, about = _describe_vocabulary(sides)
    return SumPlan(sides, tuple(sums), (*notes, *about), rows)


def _align(side: Repository, names: Mapping[str, Any]) -> Repository:
    """Rename the tensors of a model like those of the tuned one; models with and without a head differ by a prefix."""
    if side.tensors.keys() & names.keys():
        return side
    renamed = [{name: name for name in side.tensors}]
    renamed += [{prefix + name: name for name in side.tensors} for prefix in _find_prefixes(names)]
    renamed += [{name.removeprefix(prefix): name for name in side.tensors} for prefix in _find_prefixes(side.tensors)]
    found = max(renamed, key=lambda each: len(each.keys() & names.keys()))
    return replace(side, tensors={name: side.tensors[stored] for name, stored in found.items()})


def _find_prefixes(names: Iterable[str]) -> set[str]:
    """Prefixes used by libraries; those added by training scripts would make a model that no library can load."""
    found = {f"{name.partition('.')[0]}." for name in names} - {"module.", "_orig_mod."}
    return found if len(found) <= _PREFIXES else set()


def _find(side: Repository, name: str, sides: Sides) -> StoredTensor | None:
    """The tensor of this name; for a tied output layer that is not stored, the embeddings."""
    if name in side.tensors or len(side.tables) != 1:
        return side.tensors.get(name)
    is_table = any(name in each.tables for each in sides.values())
    return side.tensors[side.tables[0]] if is_table else None


def _choose_kind(parts: Iterable[StoredTensor | None], usual: str, dtype: str | None) -> str:
    """The dtype of a tensor: as requested, else that of the new base; only floating-point tensors are converted."""
    *_, tuned, new = parts
    stored = new or tuned
    if stored is None or stored.kind not in FLOATS:
        return stored.kind if stored else usual
    return KINDS[dtype] if dtype else stored.kind if new else usual


def _fit(name: str, kind: str, parts: tuple[StoredTensor | None, ...], sides: Sides) -> Sum | None:
    """The sum of a tensor that all three models have; None if their shapes do not allow one."""
    old, tuned, new = (each for each in parts if each)
    whole = (old, tuned, new)
    if old.shape == tuned.shape == new.shape:
        return Sum(name, kind, new.shape, whole, new.numbers if kind in FLOATS else 0)
    if not old.shape[1:] == tuned.shape[1:] == new.shape[1:] or not (old.shape and tuned.shape and new.shape):
        return None
    sizes = [each.vocabulary for each in sides.values()]
    if [each.shape[0] for each in whole] == sizes:
        rows, common, rest = fit_rows(*(each.shape[0] for each in whole))
        row = new.numbers // max(1, new.shape[0])
        return Sum(name, kind, (rows, *new.shape[1:]), whole, common * row, rest)
    is_head = tuned.shape[0] == sides["tuned"].classes > 0  # for different classes
    return Sum(name, kind, tuned.shape, whole, 0, "tuned") if is_head else None


def fit_rows(old: int, tuned: int, new: int) -> tuple[int, int, str]:
    """Return the rows of the result's vocabulary, how many are summed, and the model that provides the others.

    Example:
        >>> fit_rows(100, 102, 100), fit_rows(100, 100, 110), fit_rows(100, 90, 100)
        ((102, 100, 'tuned'), (110, 100, 'target'), (100, 90, 'target'))
    """
    if tuned > old != new:
        raise ModelError(
            f"both the tuned model and the new base have another vocabulary than the old base ({tuned:,} and {new:,} "
            f"tokens, not {old:,}), so the tuned model's new rows have no place; port to a base with {old:,}"
        )
    return (tuned, old, "tuned") if tuned > old else (new, min(old, tuned, new), "target")


def _differ(sides: Sides, names: list[str]) -> ModelError:
    def describe(side: Repository) -> dict[str, Tensor]:
        return {name: torch.empty(side.tensors[name].shape, device="meta") for name in names if name in side.tensors}

    tuned, new = describe(sides["tuned"]), describe(sides["target"])
    side = "target" if (words := describe_differences(new, tuned)) else "source"
    words = words or describe_differences(describe(sides["source"]), tuned)
    return ModelError(
        f"the tuned model '{sides['tuned'].reference}' and the {SIDES[side]} '{sides[side].reference}' differ: in the "
        f"{SIDES[side]}, {words}. A port needs one architecture on all three sides"
    )


def _describe_vocabulary(sides: Sides) -> tuple[int | None, list[str]]:
    """The size of the result's vocabulary, and notes on rows that are not summed; ModelError if tokens moved."""
    sizes = [each.vocabulary for each in sides.values() if each.tables and each.vocabulary]
    if len(sizes) < len(sides):
        return None, []
    rows, common, rest = fit_rows(*sizes)
    known = [(SIDES[side], each.trained_tokens) for side, each in sides.items() if each.tokens]
    for side, words in known[1:]:
        first, other = known[0]
        differing = (row for row, word in other.items() if row < common and words.get(row, word) != word)
        if (row := next(differing, None)) is not None:
            raise ModelError(
                f"token {row} is {other[row]!r} in the {first} and {words[row]!r} in the {side}: "
                "their vocabularies are ordered differently, and rows of different tokens cannot be added"
            )
    notes = []
    old, tuned, new = (each.tokens or {} for each in sides.values())
    unlike = [row for row in tuned if row < common and len({old.get(row), tuned[row], new.get(row, tuned[row])}) > 2]
    if unlike:
        pairs = [f"{row} is {tuned[row]!r} in the tuned model and {new[row]!r} in the new base" for row in unlike]
        notes += [f"rows used for different added tokens hold the sum of both: {_name_some(pairs)}"]
    if max(sizes) > rows:
        left_out = plural(max(sizes) - rows, "row")
        notes += [f"{left_out} of the vocabulary missing in the new base: left out"]
    elif rows > common:
        words = sides[rest].tokens or {}
        named = [repr(words[row]) for row in range(common, rows) if row in words]
        more = f": {_name_some(named)}" if named else ""
        copied = f"{plural(rows - common, 'row')} copied from the {SIDES[rest]}{more}"
        notes += [f"{common:,} rows of the vocabulary are summed, {copied}"]
    return rows, notes


def _list(names: list[str]) -> str:
    return f"{plural(len(names), 'tensor')} ({_name_some(names)})"


def _name_some(names: list[str]) -> str:
    return f"{', '.join(names[:_NAMED])}{' …' if len(names) > _NAMED else ''}"


# ---- from a sample of the numbers


def sample_plan(plan: SumPlan, *, own_heads: bool) -> tuple[SumPlan, RelationFacts, bool]:
    """Refine a plan by sampling all tensors; also returns how the bases are related, and if a head or vector was tuned.

    A head of the same size that does not resemble those of the bases is taken to be for other classes and copied from
    the tuned model, unless `own_heads`, which sums heads like any other tensor.
    """
    each, classes = max(1, min(_SAMPLE, _SAMPLES // max(1, len(plan.sums)))), plan.sides["tuned"].classes
    samples: list[dict[str, Tensor]] = [{}, {}, {}]
    sums, heads, copies, touched = {}, [], [], False
    for one in plan.sums:
        sums[one.name] = one
        if any(part and part.kind not in FLOATS for part in one.parts):
            _check_untouched(one)
            sums[one.name] = one if one.rest == "tuned" else one.taken("target")
        elif one.common and _is_copy(one, plan):
            copies.append(one.name)
            del sums[one.name]
        elif one.common:
            start, count = max(0, one.common - each) // 2, min(each, one.common)
            old, tuned, new = (part.read(start, count).double() for part in one.parts if part)
            if not _is_finite(old + tuned + new):
                raise one.broken()
            touched |= len(one.shape) < 2 and not torch.equal(old, tuned)
            if len(one.shape) > 1:
                samples[0][one.name], samples[1][one.name], samples[2][one.name] = old, tuned, new
                is_head = one.shape[0] == classes and not own_heads
                heads += [one.name] if is_head and min(_cosine(old, tuned), _cosine(old, new)) < RELATED else []
    for name in heads:
        beside = name.rpartition(".")[0]
        sums |= {each: one.taken("tuned") for each, one in sums.items() if each.rpartition(".")[0] == beside}
    names = [name for name in samples[0] if name not in heads]
    relation = measure_relation(samples[0], samples[1], samples[2], names)
    notes = [f"{_list(heads)} of the tuned model, a head for other classes: copied"] if heads else []
    notes += [f"{_list(copies)} of the tuned model, a copy of its tied embeddings: left out"] if copies else []
    touched = touched or any(one.rest == "tuned" for one in sums.values())
    return replace(plan, sums=tuple(sums.values()), notes=(*plan.notes, *notes)), relation, touched


def _cosine(one: Tensor, other: Tensor) -> float:
    lengths = float(one.norm() * other.norm())
    return float(one @ other) / lengths if lengths else 1.0


def _is_copy(one: Sum, plan: SumPlan) -> bool:
    """Whether an output layer that the new base does not store is a copy of the tuned model's embeddings."""
    tuned, mine = plan.sides["tuned"], one.parts[1]
    if mine is None or one.name in plan.sides["target"].tensors:
        return False
    return any(_same(tuned.tensors[name], mine) for name in tuned.tables if name != one.name)


def _check_untouched(one: Sum) -> None:
    """Refuse fine-tunings that change tensors other than floating-point ones; those are copied from the new base."""
    old, tuned, _ = one.parts
    if old is None or tuned is None or _same(old, tuned):
        return
    kinds = {part.kind for part in one.parts if part} - set(FLOATS)
    raise ModelError(
        f"'{one.name}' is stored as {' and '.join(sorted(kinds))}, which cannot be added (it is probably quantised); "
        "give the original models, in float32, float16 or bfloat16"
    )


def _same(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.kind, one.shape) != (other.kind, other.shape):
        return False
    return all(map(torch.equal, _read_blocks(one), _read_blocks(other)))


# ---- the configuration


_LAYER = re.compile(r"\.\d+\..*\.(weight|bias)$")
"""Parameters of numbered layers: where only one side has them, it has another architecture."""
_ASIDE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "auto_map", "vocab_size", "text_config")
"""Entries that a fine-tuning does not change, or that follow from the weights."""


def compose_config(plan: SumPlan, kind: str) -> tuple[dict[str, Any], list[str]]:
    """Apply the fine-tuning's changes to the new base's config.json; also returns notes on conflicts."""
    old, tuned, new = (dict(each.config) for each in plan.sides.values())
    notes = []
    for name in {**old, **tuned}:
        if name in _ASIDE or tuned.get(name) == old.get(name) or tuned.get(name) == new.get(name):
            continue
        if acts(name, tuned.get(name)):
            notes.append(f"'{name}' in the tuned model's config.json tells what is loaded or run: not copied")
            continue
        if name in new and new[name] != old.get(name) and name not in (*HEAD_ENTRIES, "architectures"):
            notes.append(
                f"'{name}' in config.json is {tuned.get(name)!r:.60} in the tuned model and {new[name]!r:.60} in the "
                "new base; the latter was kept"
            )
        elif name in tuned:
            new[name] = tuned[name]
        else:
            new.pop(name, None)
    if plan.rows is not None:
        inner = new if "vocab_size" in new else dict(new["text_config"])
        inner["vocab_size"] = plan.rows
        new |= {} if inner is new else {"text_config": inner}
    tables = sum(len(one.shape) == 2 and one.shape[0] == plan.rows for one in plan.sums)
    if tables > len(plan.sides["target"].tables):
        new["tie_word_embeddings"] = False
    elif (tied := plan.sides["target"].config.get("tie_word_embeddings")) is not None:
        new["tie_word_embeddings"] = tied
    else:
        new.pop("tie_word_embeddings", None)
    if "auto_map" in new:
        notes.append(
            "config.json refers to code of the new base (auto_map), which is not copied: put its files beside the "
            "weights if transformers does not support this type of model"
        )
    for name in ("dtype", "torch_dtype"):
        if name in new:
            new[name] = str(FLOATS[kind]).removeprefix("torch.")
    return new, notes

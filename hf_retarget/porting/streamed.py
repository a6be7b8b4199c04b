"""Ports without images (`--data none`): the fine-tuning is added file by file, for models of any kind and size."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from hf_retarget.data.load import NO_DATA
from hf_retarget.document import (
    DataFacts,
    PermutationFacts,
    PortDocument,
    RelationFacts,
    TextFacts,
    read_document,
)
from hf_retarget.errors import ModelError, PortError
from hf_retarget.evaluation.gates import Evidence, list_errors, list_warnings, look_at_gates
from hf_retarget.files import (
    atomic_path,
    copy_folder,
    hash_file,
    hash_files,
    load_record,
    make_folder,
    save_record,
    write_json,
    write_text,
)
from hf_retarget.models.reference import Reference, hash_weights
from hf_retarget.models.relation import INDEPENDENT, compare_samples
from hf_retarget.models.weights import FLOATS, INDEX, KINDS
from hf_retarget.names import CARD, MODEL_CONFIG, PORT, RECIPE, REPORT, SIDES
from hf_retarget.porting.inputs import Given, check_update
from hf_retarget.porting.result import describe_course, hide_paths, save_recipe
from hf_retarget.porting.resume import ENVIRONMENT, Workplace, naming
from hf_retarget.publish import Destination, Pushed, push_folder
from hf_retarget.publish.card import write_port_card
from hf_retarget.publish.contents import identify
from hf_retarget.recipe import Recipe
from hf_retarget.report.report import compose_summary
from hf_retarget.run import Run, describe_environment, from_main_process, in_main_process
from hf_retarget.streaming.repository import Repository, open_repository, sample_side
from hf_retarget.streaming.sums import Sides, Sum, SumPlan, compose_config, find_batchnorm, plan_sums, sample_plan
from hf_retarget.streaming.text import encode_texts, judge_texts, measure_texts, sum_losses
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_bytes
from hf_retarget.words import size

_AGAIN = "the same command with --resume continues"
_IMAGES = "some images are needed (labels are not): name them with --data"


@dataclass(frozen=True)
class StreamedPort:
    """A port without images, already saved."""

    document: PortDocument
    """The content of port.json."""
    folder: Path

    @property
    def verdict(self) -> str:
        """Whether the port was worth it, in one line."""
        return self.document.verdict

    def push_to_hub(self, repository: str, *, commit_message: str | None = None, **options: Any) -> Pushed | None:
        """Push the folder in one commit, and verify it; None except in the main process."""
        destination = Destination(repository, message=commit_message, **options)
        return in_main_process(lambda: push_folder(self.folder, destination))


def port_streamed(
    models: tuple[Reference, ...],
    recipe: Recipe,
    run: Run,
    given: Given,
    place: Workplace,
    dtype: str | None = None,
) -> StreamedPort:
    """Add a fine-tuning to a new base: read each tensor in blocks, sum in float32, and write."""
    _check_options(recipe, given)
    if place.out is None:
        raise PortError("a port without images is written while it is computed and needs a folder; give out=")
    with place.held(), tempfile.TemporaryDirectory(prefix="hf-retarget-") as temporary:
        with run.stage("loading", "reading headers"):
            look_first(open_sides(models, run, given, Path(temporary, "peeked"), peek=True), given, dtype)
        with run.stage("loading", "finding the files"):
            sides = open_sides(models, run, given, Path(temporary, "opened"))
            plan, relation, touched = sample_plan(plan_sums(sides, dtype), own_heads=recipe.port.head == "own")
            _check_relation(relation, given)
            check_update(recipe.port, relation)
            gates = look_at_gates(Evidence(relation, head_tuned=touched))
            if errors := list_errors(gates):
                raise PortError(errors[0])
            shards = plan_shards(plan.sums, sides["target"])
            done = sum(each.stat().st_size for each in (place.hidden / "model").glob("*.safetensors"))
            check_room(place.folder, sum(each.size for each in plan.sums) - done)
            pieces = _encode(given, plan)
            hashes = _hash_all(sides)
        key = _describe_run(hashes, recipe, dtype)
        place.begin(key, run)  # texts change no weight: what was summed before they were read is still right
        config, conflicts = compose_config(plan, KINDS[dtype] if dtype else sides["target"].kind)
        notes = (*plan.notes, *conflicts)
        for note in (*notes, f"bases: {relation.sentence}"):
            run.progress.say(note)
        folder, alpha = place.hidden / "model", recipe.port.alpha or 1.0

        def write_model() -> None:
            make_folder(folder)
            for path in folder.iterdir():
                if path.name not in shards or not _is_whole(path, _record(place, path.name)):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            for file in run.progress.track(shards, "adding the fine-tuning"):
                if not (folder / file).exists():  # else written by an interrupted run
                    digest = write_shard(folder / file, shards[file], alpha, recipe.port.update)
                    save_record(_record(place, file), {"sha256": digest})
            write_index(folder, shards)
            write_json(folder / MODEL_CONFIG, config)
            for name, path in _choose_tokenizer(plan).companions.items():
                (folder / name).write_bytes(read_bytes(path, MAX_DOCUMENT_BYTES))

        with run.stage("adding"), naming(place.folder, _AGAIN):
            in_main_process(write_model)
        with naming(place.folder, _AGAIN):
            facts = from_main_process(in_main_process(lambda: _score(given, folder, sides, pieces, run)))
        document = hide_paths(
            PortDocument(
                verdict=_judge(facts, relation, list_warnings(gates), plan, alpha),
                winner="",
                contenders=(),
                steps_planned=0,
                models={
                    side: replace(each.facts, location=identify(each.reference), hashes=hashes[side])
                    for side, each in sides.items()
                },
                data=DataFacts(NO_DATA, sides["tuned"].classes, {}, NO_DATA),
                recipe=recipe.to_dict(),
                head={},
                graph={},
                permutation=PermutationFacts(0.0),
                relation=relation,
                text=facts,
                gates=gates,
                notes=notes,
                run=key | {"text": hash_file(Path(given.text).expanduser())[:20] if given.text is not None else None},
                **describe_course(run),
            )
        )

        def write(result: Path) -> None:
            copy_folder(folder, result)
            save_recipe(recipe, result / RECIPE)
            write_json(result / PORT, replace(document, files=hash_files(result)).to_json())
            write_text(result / REPORT, compose_summary(document))
            write_text(result / CARD, write_port_card(document, (), library=sides["target"].library))

        with naming(place.folder, _AGAIN):
            place.finish(write, run)
        return StreamedPort(read_document(place.folder / PORT), place.folder)


def _record(place: Workplace, file: str) -> Path:
    """The record of a complete file of weights."""
    return place.hidden / f"{file}.json"


def _is_whole(path: Path, record: Path) -> bool:
    """Whether a file of weights is what an interrupted run wrote."""
    try:
        return path.is_file() and not path.is_symlink() and load_record(record)["sha256"] == hash_file(path)
    except (OSError, ValueError, KeyError):
        return False


# ---- early checks


def _check_options(recipe: Recipe, given: Given) -> None:
    options, tuning = recipe.port, recipe.finetune.steps or recipe.finetune.epochs
    if options.method not in ("auto", "naive") or tuning or given.permutation is not None:
        raise PortError(
            f"without images, only a naive port is possible (--method auto or naive, no fine-tuning); {_IMAGES}"
        )
    if options.save_as != "model":
        raise PortError(
            "--save-as lora needs images to score the adapter as PEFT loads it: name them with --data, or leave it "
            "out and extract an adapter from the model (mergekit-extract-lora); an adapter given with --src-ft fits "
            "the new base as it is"
        )
    if options.targets in ("teacher", "both"):
        raise PortError(f"--targets has no meaning without images; {_IMAGES}")
    for field in fields(given):
        if field.name not in ("text", "force_relation", "force_base") and getattr(given, field.name) != field.default:
            option = field.name.replace("_", "-")
            raise PortError(f"--{option} has no meaning without images; leave it out, or name images with --data")


def look_first(sides: Sides, given: Given, dtype: str | None = None) -> RelationFacts | None:
    """Refuse ports that headers and samples of the weights rule out, before large downloads."""
    if found := find_batchnorm(sides):
        raise PortError(f"{found}, whose statistics have to be re-estimated; {_IMAGES}")
    plan = plan_sums(sides, dtype)
    _encode(given, plan)
    with suppress(OSError, ValueError, ModelError):  # measured again once the weights are here
        samples = [sample_side(each, plan.summed) for each in sides.values()]
        relation = compare_samples(samples, ())
        if relation and math.isfinite(relation.cosine):  # else an error names the tensor later
            _check_relation(relation, given)
            return relation
    return None


def open_sides(models: tuple[Reference, ...], run: Run, given: Given, place: Path, *, peek: bool = False) -> Sides:
    """The files of the three models; with `peek`, only the headers of those on the Hub."""
    found: dict[str, Repository] = {}
    for side, model in zip(SIDES, models, strict=False):
        make_folder(place / side)
        base = found["source"] if side == "tuned" else None
        found[side] = open_repository(
            model, run.loading, place / side, peek=peek, base=base, force_base=given.force_base
        )
    return found


def _hash_all(sides: Sides) -> dict[str, dict[str, str]]:
    """The known sha256 of all files, hashed in parallel because this dominates the time."""
    with ThreadPoolExecutor() as pool:
        made = {name: zip(side.files, pool.map(hash_weights, side.files), strict=True) for name, side in sides.items()}
        return {name: {path.name: found for path, found in each if found} for name, each in made.items()}


def _check_relation(relation: RelationFacts, given: Given) -> None:
    if relation.word == INDEPENDENT and not given.force_relation:
        raise PortError(
            f"without images, nothing can be matched, and these bases are {relation.sentence}; {_IMAGES}. "
            "--force-relation adds the fine-tuning anyway"
        )
    unlike = next((each for each in look_at_gates(Evidence(relation)) if each.name == "another base"), None)
    if unlike and unlike.found and not given.force_relation:
        raise PortError(f"{unlike.found}. --force-relation adds the difference all the same")


# ---- texts


def _choose_tokenizer(plan: SumPlan) -> Repository:
    """Choose whose tokenizer and generation settings to keep: the tuned model's, unless it lacks tokens."""
    tuned, new = plan.sides["tuned"], plan.sides["target"]
    if tuned.tokens is not None and new.tokens is not None:
        lacks = bool(new.tokens.keys() - tuned.tokens.keys())
    else:
        lacks = (plan.rows or 0) > (tuned.vocabulary or 0)
    known = [each for each in ((new, tuned) if lacks else (tuned, new)) if each.companions]
    known += [plan.sides["source"]] if plan.sides["source"].companions else []
    return next((each for each in known if each.tokens), known[0] if known else new)


def _encode(given: Given, plan: SumPlan) -> list[list[int]]:
    """Encode the texts; ModelError or DataError says why these models cannot read them."""
    if given.text is None:
        return []
    return encode_texts(given.text, _choose_tokenizer(plan), plan.sides.values())


def _score(given: Given, folder: Path, sides: Sides, pieces: list[list[int]], run: Run) -> TextFacts | None:
    if given.text is None:
        return None
    plain: dict[str, Any] = {"arch": None, "allow_pickle": False, "token": None}
    losses = {}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="merged.") as merged:
        for name, side in {**sides, "port": open_repository(folder, plain, folder)}.items():
            if side.is_adapter:
                write_merged(side, sides["source"], Path(merged))
                side = open_repository(merged, plain, folder)
            losses[name] = sum_losses(side, pieces, run, SIDES.get(name, name))
    return measure_texts(Path(given.text).name, pieces, losses)


def _judge(facts: TextFacts | None, relation: RelationFacts, warnings: list[str], plan: SumPlan, alpha: float) -> str:
    if relation.word == INDEPENDENT:
        warnings = [f"these bases are {relation.sentence}, and the fine-tuning was added anyway", *warnings]
    start = f"Check first: {'; '.join(warnings)}. " if warnings else ""
    if facts is not None:
        return start + judge_texts(facts)
    advice = "--text measures how much of it was kept" if plan.rows else "hf-retarget evaluate scores the result"
    return (
        f"{start}Not scored: without images, the fine-tuning was added to the new base as it is, with a factor of "
        f"{alpha:g}; {advice}."
    )


# ---- port.json


def _describe_run(hashes: Mapping[str, Any], recipe: Recipe, dtype: str | None) -> dict[str, Any]:
    """Everything the weights depend on."""
    return {
        **hashes,
        "port": {name: getattr(recipe.port, name) for name in ("alpha", "update", "head")},
        "dtype": dtype,
        ENVIRONMENT: describe_environment(),
    }


# ---- files of weights, written while their numbers are computed

LARGEST = 5_000_000_000
"""Maximum bytes of a file, unless a single tensor is larger; less if the shards of the new base are smaller."""


def plan_shards(sums: Iterable[Sum], like: Repository) -> dict[str, list[Sum]]:
    """Divide the tensors into files; timm reads only a single file."""
    known = {each.name: each for each in sums}
    most = LARGEST
    if like.library == "timm":
        most = sum(each.size for each in known.values())
    elif len(like.files) > 1:
        sizes = (sum(each.size for each in like.tensors.values() if each.path == path) for path in like.files)
        most = min(LARGEST, max(sizes))
    empty = {name: torch.empty(each.size, dtype=torch.uint8, device="meta") for name, each in known.items()}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=max(1, most))
    return {file: [known[name] for name in names] for file, names in split.filename_to_tensors.items()}


def check_room(folder: Path, needed: int) -> None:
    """Raise PortError if the disk of a new folder has too little space."""
    place = next(each for each in (folder, *folder.parents) if each.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        raise PortError(
            f"the result takes {size(needed)}, but '{place}' has only {size(free)} left; name another folder"
        )


def write_shard(path: Path, sums: Iterable[Sum], alpha: float, update: float) -> str:
    """Write one file atomically, block by block, and return its sha256."""
    ordered = sorted(sums, key=lambda each: (-_width(each), each.name))  # aligned as safetensors does
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in ordered:
        header[each.name] = {"dtype": each.kind, "shape": each.shape, "data_offsets": [end, end := end + each.size]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256(start := struct.pack("<Q", len(text)) + text)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(start)
        for each in ordered:
            for block in each.compute(alpha, update):
                content = block.view(torch.uint8).numpy().data
                file.write(content)
                digest.update(content)
    return digest.hexdigest()


def _width(one: Sum) -> int:
    return FLOATS[one.kind].itemsize if one.kind in FLOATS else one.size // max(1, one.numbers)


def write_merged(side: Repository, base: Repository, folder: Path) -> None:
    """Write an adapter merged into its base, in the dtype of the base."""
    kinds = {name: base.kind if each.kind in FLOATS else each.kind for name, each in side.tensors.items()}
    sums = [Sum(name, kinds[name], each.shape, (None, each, None), 0, "tuned") for name, each in side.tensors.items()]
    shards = plan_shards(sums, base)
    for file, each in shards.items():
        write_shard(folder / file, each, alpha=1.0, update=1.0)
    write_index(folder, shards)
    write_json(folder / MODEL_CONFIG, side.config)


def write_index(folder: Path, shards: dict[str, list[Sum]]) -> None:
    """Write the index of several shards."""
    if len(shards) > 1:
        places = {each.name: file for file, sums in shards.items() for each in sums}
        total = sum(each.size for sums in shards.values() for each in sums)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})

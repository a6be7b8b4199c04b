"""A port without images (`--data none`): the fine-tuning is added file by file, whatever the model, however large."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from hf_retarget.data.load import NO_DATA
from hf_retarget.document import (
    DataFacts,
    ModelFacts,
    PermutationFacts,
    PortDocument,
    RelationFacts,
    TextFacts,
    read_document,
)
from hf_retarget.errors import ModelError, PortError
from hf_retarget.evaluation.gates import Evidence, list_errors, list_warnings, look_at_gates
from hf_retarget.files import copy_folder, hash_file, hash_files, make_folder, write_json, write_text
from hf_retarget.models.reference import hash_weights
from hf_retarget.models.relation import INDEPENDENT, compare_samples, sample_weights
from hf_retarget.models.transformers_models import read_language_config
from hf_retarget.models.weights import FLOATS
from hf_retarget.names import CARD, MODEL_CONFIG, PORT, RECIPE, REPORT, SIDES
from hf_retarget.porting.inputs import Given, check_update
from hf_retarget.porting.result import describe_course, publish_document, publish_recipe
from hf_retarget.porting.resume import ENVIRONMENT, Workplace
from hf_retarget.publish import Destination, Pushed, push_folder
from hf_retarget.publish.card import write_port_card
from hf_retarget.publish.contents import identify
from hf_retarget.recipe import Recipe
from hf_retarget.report.report import compose_summary
from hf_retarget.run import Run, describe_environment, from_main_process, in_main_process
from hf_retarget.streaming.repository import Repository, copy_companion, open_repository
from hf_retarget.streaming.shards import check_room, plan_shards, write_index, write_shard
from hf_retarget.streaming.sums import Plan, Settled, Sides, compose_config, kind_of, plan_sums, settle
from hf_retarget.streaming.text import encode_texts, judge_texts, measure_texts, sum_losses

_IMAGES = "some images are needed (labels are not): name them with --data"


@dataclass(frozen=True)
class StreamedPort:
    """A port that was written as it was made."""

    document: PortDocument
    """What port.json holds."""
    folder: Path

    @property
    def verdict(self) -> str:
        """Whether it was worth it, in one line."""
        return self.document.verdict

    def push_to_hub(self, repository: str, *, commit_message: str | None = None, **options: Any) -> Pushed | None:
        """Push the folder in one commit, and read it back; None in other processes than the first."""
        destination = Destination(repository, message=commit_message, **options)
        return in_main_process(lambda: push_folder(self.folder, destination))


def port_streamed(
    models: tuple[str | Path | nn.Module, ...],
    recipe: Recipe,
    run: Run,
    given: Given,
    place: Workplace,
    dtype: str | None = None,
) -> StreamedPort:
    """Add a fine-tuning to a new base: each tensor is read in blocks, summed in float32, and written."""
    _check_options(recipe, given)
    if place.out is None:
        raise PortError("a port without images is written as it is made, and needs a folder: give out=")
    place = replace(place, unfinished="model/*.safetensors")
    with place.held(), tempfile.TemporaryDirectory(prefix="hf-retarget-") as temporary:
        with run.stage("loading", "reading headers"):
            _look_first(models, run, given, Path(temporary, "peeked"), dtype)
        with run.stage("loading", "finding the files"):
            sides = _open(models, run, Path(temporary, "opened"))
            settled = settle(plan_sums(sides, dtype), own_heads=recipe.port.head == "own")
            gates = _check_numbers(settled, recipe, given)
            plan, relation = settled.plan, settled.relation
            shards = plan_shards(plan.sums, sides["target"])
            check_room(place.folder, sum(each.size for each in plan.sums))
            pieces = _encode(given, plan)
            hashes = {side: {path.name: hash_weights(path) for path in each.files} for side, each in sides.items()}
        key = _describe_run(hashes, recipe, given, dtype)
        place.begin(key, run)
        config, conflicts = compose_config(plan, kind_of(dtype) if dtype else sides["target"].kind)
        notes = (*plan.notes, *conflicts)
        for note in (*notes, f"bases: {relation.sentence}"):
            run.progress.say(note)
        folder, alpha = place.hidden / "model", recipe.port.alpha or 1.0

        def write_model() -> None:
            make_folder(folder)
            for file in run.progress.track(shards, "adding the fine-tuning"):
                if not (folder / file).exists():  # else an interrupted run has written it
                    write_shard(folder / file, shards[file], alpha, recipe.port.update)
            write_index(folder, shards)
            write_json(folder / MODEL_CONFIG, config)
            for name, path in _choose_tokenizer(plan).companions.items():
                copy_companion(path, folder / name)

        with run.stage("adding"), _naming(place.folder):
            in_main_process(write_model)
        facts = from_main_process(in_main_process(lambda: _score(given, folder, sides, pieces, run)))
        document = publish_document(
            PortDocument(
                verdict=_judge(facts, relation, list_warnings(gates), plan, alpha),
                winner="",
                contenders=(),
                steps_planned=0,
                models={side: _describe_side(each, hashes[side]) for side, each in sides.items()},
                data=DataFacts(NO_DATA, sides["tuned"].classes, {}, NO_DATA),
                recipe=recipe.to_dict(),
                head={},
                graph={},
                permutation=PermutationFacts(0.0),
                relation=relation,
                text=facts,
                gates=gates,
                notes=notes,
                run=key,
                **describe_course(run),
            )
        )

        def write(result: Path) -> None:
            copy_folder(folder, result)
            publish_recipe(recipe, result / RECIPE)
            write_json(result / PORT, replace(document, files=hash_files(result)).to_json())
            write_text(result / REPORT, compose_summary(document))
            write_text(result / CARD, write_port_card(document, (), library=sides["target"].library))

        with _naming(place.folder):
            place.finish(write, run)
        return StreamedPort(read_document(place.folder / PORT), place.folder)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PortError(f"cannot write '{folder}': {error}; the same command with --resume continues") from error


# ---- what is refused


def _check_options(recipe: Recipe, given: Given) -> None:
    options, tuning = recipe.port, recipe.finetune.steps or recipe.finetune.epochs
    if options.method not in ("auto", "naive") or tuning or given.permutation is not None:
        raise PortError(f"only a naive port (--method auto or naive) does without images; {_IMAGES}")
    if options.save_as != "model":
        raise PortError(f"an adapter is scored as it is loaded, so --save-as lora needs images; {_IMAGES}")
    if options.targets in ("teacher", "both"):
        raise PortError(f"without images, there is nothing to aim at, so --targets has no meaning; {_IMAGES}")
    for field in fields(given):
        if field.name not in ("text", "force_relation") and getattr(given, field.name) != field.default:
            option = field.name.replace("_", "-")
            raise PortError(f"without images, --{option} has no meaning; leave it out, or name images with --data")


def _look_first(
    models: tuple[str | Path | nn.Module, ...], run: Run, given: Given, place: Path, dtype: str | None
) -> None:
    """Refuse what headers and a few ranges of the weights rule out, before anything large is downloaded."""
    sides = _open(models, run, place, peek=True)
    plan = plan_sums(sides, dtype)
    _encode(given, plan)
    samples = []
    with suppress(OSError, ValueError, ModelError):  # it is measured again when the weights are there
        samples = [sample_weights(each.files, each.hub, plan.summed) for each in sides.values()]
    relation = compare_samples(samples, ()) if samples else None
    if relation is not None:
        _check_relation(relation, given)


def _open(models: tuple[str | Path | nn.Module, ...], run: Run, place: Path, *, peek: bool = False) -> Sides:
    found = {}
    for side, model in zip(SIDES, models, strict=False):
        make_folder(place / side)
        found[side] = open_repository(model, run.loading, place / side, peek=peek)
    return found


def _check_relation(relation: RelationFacts, given: Given) -> None:
    if relation.word == INDEPENDENT and not given.force_relation:
        raise PortError(
            f"without images, nothing can be matched, and these bases are {relation.sentence}; {_IMAGES}. "
            "--force-relation adds the fine-tuning all the same"
        )


def _check_numbers(settled: Settled, recipe: Recipe, given: Given) -> Any:
    _check_relation(settled.relation, given)
    check_update(recipe.port, settled.relation)
    gates = look_at_gates(Evidence(settled.relation, head_tuned=settled.touched))
    if errors := list_errors(gates):
        raise PortError(errors[0])
    return gates


# ---- texts


def _choose_tokenizer(plan: Plan) -> Repository:
    """The side whose tokenizer and generation settings go with the result: the tuned model's, if it knows all rows."""
    tuned, new = plan.sides["tuned"], plan.sides["target"]
    order = (new, tuned) if plan.rows and plan.rows > (tuned.vocabulary or 0) else (tuned, new)
    known = [each for each in (*order, plan.sides["source"]) if each.companions]
    return next((each for each in known if each.tokenizer), known[0] if known else new)


def _encode(given: Given, plan: Plan) -> list[list[int]]:
    """The texts as tokens; ModelError or DataError says why these models cannot read them."""
    if given.text is None:
        return []
    for each in plan.sides.values():
        read_language_config(each.config, each.reference)
    return encode_texts(given.text, _choose_tokenizer(plan), min(each.vocabulary or 0 for each in plan.sides.values()))


def _score(given: Given, folder: Path, sides: Sides, pieces: list[list[int]], run: Run) -> TextFacts | None:
    if given.text is None:
        return None
    port = open_repository(folder, {"arch": None, "allow_pickle": False, "token": None}, folder)
    models = {**{SIDES[side]: (side, each) for side, each in sides.items()}, "port": ("port", port)}
    losses = {side: sum_losses(each, pieces, run, who) for who, (side, each) in models.items()}
    return measure_texts(Path(given.text).name, pieces, losses)


def _judge(facts: TextFacts | None, relation: RelationFacts, warnings: list[str], plan: Plan, alpha: float) -> str:
    if relation.word == INDEPENDENT:
        warnings = [f"these bases are {relation.sentence}, and the fine-tuning was added all the same", *warnings]
    start = f"Check first: {'; '.join(warnings)}. " if warnings else ""
    if facts is not None:
        return start + judge_texts(facts)
    advice = "--text tells how much of it was kept" if plan.rows else "hf-retarget evaluate tells how good it is"
    return (
        f"{start}Not scored: there were no images, so the fine-tuning was added to the new base as it is, by a factor "
        f"of {alpha:g}; {advice}."
    )


# ---- port.json


def _describe_run(hashes: Mapping[str, Any], recipe: Recipe, given: Given, dtype: str | None) -> dict[str, Any]:
    """All that the result depends on."""
    key = {
        **hashes,
        "port": {name: getattr(recipe.port, name) for name in ("alpha", "update", "head")},
        "dtype": dtype,
        "text": hash_file(Path(given.text).expanduser())[:20] if given.text is not None else None,
        ENVIRONMENT: describe_environment(),
    }
    return dict(json.loads(json.dumps(key)))


def _describe_side(side: Repository, hashes: Mapping[str, str | None]) -> ModelFacts:
    return ModelFacts(
        reference=side.reference,
        architecture=side.architecture,
        classes=side.classes,
        location=identify(side.reference),
        library=side.library,
        revision=side.hub.commit if side.hub else None,
        hub_id=side.hub.repository if side.hub else None,
        base_models=side.bases,
        license=side.licence.get("license"),
        license_link=side.licence.get("license_link"),
        hashes={name: value for name, value in hashes.items() if value},
        dtype=str(FLOATS[side.kind]).removeprefix("torch."),
    )

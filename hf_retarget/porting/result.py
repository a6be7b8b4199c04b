"""A finished port: the model, its document (port.json), and how it is saved and pushed."""

from __future__ import annotations

import io
import math
import random
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from hf_retarget.adapters.writing import Adapter, compose_adapter
from hf_retarget.advice import KEEP, advise, choose_action
from hf_retarget.contenders import BESIDE
from hf_retarget.data import ImageData, Split
from hf_retarget.data.batches import derive_seed
from hf_retarget.document import (
    FORMAT,
    AdapterFacts,
    ContenderFigures,
    DataFacts,
    ModelFacts,
    PermutationFacts,
    PortDocument,
    ScoreFigures,
    StepFigures,
    parse_document,
)
from hf_retarget.errors import PortError
from hf_retarget.evaluation.scorer import Score, Scorer, count_flips, measure_lead
from hf_retarget.files import hash_files, to_json, write_json, write_text
from hf_retarget.graph import Permutation, PermutationGraph
from hf_retarget.inspection import draw_fit
from hf_retarget.models import Checkpoint, save_model
from hf_retarget.models.timm_models import is_timm
from hf_retarget.names import CARD, GRAPH, PERMUTATION, RECIPE
from hf_retarget.names import PORT as PORT_FILE
from hf_retarget.porting.contest import Contest, Entry, find_unmatched
from hf_retarget.porting.cost import count_images
from hf_retarget.porting.inputs import Inputs
from hf_retarget.porting.resume import Workplace
from hf_retarget.publish import Destination, Pushed, push_folder
from hf_retarget.publish.card import write_port_card
from hf_retarget.publish.contents import identify, shorten_all, shorten_command, shorten_path
from hf_retarget.recipe import Recipe
from hf_retarget.report import compose_report
from hf_retarget.report.classes import KINDS
from hf_retarget.report.report import describe_result
from hf_retarget.run import Run, in_main_process, list_versions, peak_memory
from hf_retarget.untrusted import parse_json
from hf_retarget.words import percent

CURVE = "figures/curve.png"
"""The picture shown on the card, if the folder has it."""

_SIDE = 112  # maximum size of a thumbnail in pixels
_SMALL = 4096  # maximum bytes of a lossless thumbnail
_MOST_FLIPPED = 1000
_RULE = "as many of each kind as there are, up to a share; within a kind drawn at random with the seed of the port"


@dataclass(frozen=True, eq=False)
class PortResult:
    """A ported model and its document."""

    model: nn.Module = field(repr=False)
    """The ported model on the CPU, in eval mode; fine-tuned further if the recipe says so."""
    weights: dict[str, Tensor] = field(repr=False)
    """Its state dict, in float32."""
    permutation: Permutation | None = field(repr=False)
    """The permutation of the best step, reusable for other fine-tunings between the same bases; None if nothing was
    matched."""
    document: PortDocument = field(repr=False)
    """The content of port.json."""
    recipe: Recipe = field(repr=False)
    graph: PermutationGraph | None = field(repr=False)
    inputs: Inputs = field(repr=False)
    dtype: torch.dtype | None = field(default=None, repr=False)
    """The type to store weights in; that of the new base if None."""
    thumbnails: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    """Test images shown in the report, by number."""
    adapter: Adapter | None = field(default=None, repr=False)
    """Saved instead of the model, if the recipe says so."""

    def __repr__(self) -> str:
        return f"PortResult({self.verdict!r})"

    @property
    def verdict(self) -> str:
        """Whether the port was worth it, in one line."""
        return self.document.verdict

    @property
    def history(self) -> tuple[StepFigures, ...]:
        """The steps of the port."""
        return self.document.port.steps

    @property
    def best_step(self) -> int | None:
        """The best step on validation images."""
        return self.document.port.best_step

    def advised(self, out: str | Path, options: Mapping[str, Any]) -> PortResult:
        """Add the next command to the document; `options` are the arguments of the port."""
        step = shorten_command(advise(self.document, shorten_path(str(out)), options))
        return replace(self, document=replace(self.document, next_step=step))

    def save(self, folder: str | Path, *, overwrite: bool = False, lock: bool = True) -> Path:
        """Save atomically to a folder that timm or transformers can load."""
        place = Workplace.at(folder, suffix="saving", overwrite=overwrite, lock=lock)
        with place.held():
            place.finish(self.write, Run())
        return place.folder

    def push_to_hub(self, repository: str, *, commit_message: str | None = None, **options: Any) -> Pushed | None:
        """Push the model, its card and all figures in one commit, and verify it; None except in the main process.

        Options are `private`, `revision`, `create_pr`, `replace_card` and `token`.
        """
        destination = Destination(repository, message=commit_message, **options)

        def push() -> Pushed:
            with tempfile.TemporaryDirectory(prefix="hf-retarget-") as place:
                self.write(Path(place))
                return push_folder(place, destination)

        return in_main_process(push)

    def write(self, folder: Path) -> None:
        """Write all files into a folder."""
        inputs = self.inputs
        save_model(
            folder,
            self.weights if self.adapter is None else None,
            inputs.target,
            num_classes=inputs.classes,
            labels=inputs.labels,
            dtype=self.dtype,
            config=inputs.preprocess.config,
        )
        try:
            if self.adapter is not None:
                self.adapter.save(folder)
            if self.permutation is not None and self.graph is not None:
                self.permutation.save(folder / PERMUTATION)
                self.graph.save(folder / GRAPH)
            save_recipe(self.recipe, folder / RECIPE)
            pinned = replace(self.document, files=hash_files(folder))
            write_json(folder / PORT_FILE, pinned.to_json())
            self._write_report(folder)
            curve = CURVE if (folder / CURVE).is_file() else None
            rows = [
                (
                    describe_result(each, self.document),
                    {**asdict(each.test), "also": each.also.top1 if each.also else None},
                )
                for each in self.document.table
            ]
            if self.adapter is not None and (test := self.adapter.facts.test):
                rows.append(("the adapter, as PEFT loads it", {**asdict(test), "also": None}))
            card = write_port_card(self.document, rows, library=name_library(inputs.target), curve=curve)
            write_text(folder / CARD, card)
        except OSError as error:
            raise PortError(f"cannot write to '{folder}': {error}") from error

    def _write_report(self, folder: Path) -> None:
        """Write report.html and figures/; a failure to draw only causes a warning."""
        try:
            report = compose_report(self.document, self.thumbnails, self._draw_graph())
        except Exception as error:  # of any kind: a page must not cost hours of work
            words = f"no report.html: {type(error).__name__}: {error}; all figures are in port.json"
            warnings.warn(words, stacklevel=2)
            return
        for problem in report.problems:
            warnings.warn(f"the report is incomplete: {problem}", stacklevel=2)
        report.save(folder)

    def _draw_graph(self) -> str | None:
        if self.graph is None:
            return None
        groups = self.document.matching.get("groups", ())
        gains = {each["name"]: each["after"] - each["before"] for each in groups if each["after"] is not None}
        notes = {
            each["name"]: f"{each['moved']:.0%} moved"
            + (f", cosine {each['before']:.3f} → {each['after']:.3f}" if each["after"] is not None else "")
            for each in groups
        }
        return draw_fit(self.graph, self.inputs.target.architecture, gains, notes)


def make_result(contest: Contest, dtype: torch.dtype | None, key: dict[str, Any]) -> PortResult:
    """Build the result of a finished contest."""
    samples, thumbnails = choose_samples(contest)
    weights = contest.result.made.weights
    adapter = make_adapter(contest, weights, dtype) if contest.recipe.port.save_as == "lora" else None
    contest.scorer.load(weights)
    best = contest.winner.made.best
    return PortResult(
        model=contest.scorer.model.cpu().eval(),
        weights=weights,
        permutation=best.permutation if best else None,
        document=compose_document(contest, samples, key, adapter.facts if adapter else None),
        recipe=contest.recipe,
        graph=contest.traced.graph if contest.is_traced else None,
        inputs=contest.inputs,
        dtype=dtype,
        thumbnails=thumbnails,
        adapter=adapter,
    )


def make_adapter(contest: Contest, weights: dict[str, Tensor], dtype: torch.dtype | None) -> Adapter:
    """Convert the port to an adapter of the new base, and score it as loaded by PEFT."""
    inputs, recipe, run = contest.inputs, contest.recipe, contest.run
    with run.stage("adapter", "making the adapter"):
        about = (inputs.model, inputs.comparison.head, recipe.port, inputs.preprocess.input_size, dtype)
        made = compose_adapter(inputs.target, weights, *about)
        loaded = made.load(inputs.target.build(inputs.classes))
    score = Scorer(loaded, inputs.data, inputs.classes, recipe.port, run).score(inputs.data.test)
    figures, lead = _describe_score(score, False), measure_lead(score, contest.result.test)
    return replace(made, facts=replace(made.facts, test=figures, lead=lead))


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Save the recipe, with only the last part of a path to the data, since it may be published."""
    recipe.override(**{"data.reference": shorten_path(recipe.data.reference)}).save(path)


def name_library(checkpoint: Checkpoint) -> str:
    """The library that loads a model: timm, transformers, or plain pytorch."""
    if checkpoint.library != "timm":
        return checkpoint.library
    return "timm" if is_timm(checkpoint.architecture) else "pytorch"


# ---- port.json


def compose_document(
    contest: Contest, samples: dict[str, Any], key: dict[str, Any], adapter: AdapterFacts | None = None
) -> PortDocument:
    """Build the document of a finished port."""
    inputs, run, winner = contest.inputs, contest.run, contest.winner
    best, given = winner.made.best, inputs.given.permutation
    data, unmatched = inputs.data, find_unmatched(contest.entries, winner)
    document = PortDocument(
        verdict=contest.judge(),
        winner=winner.contender.name,
        contenders=tuple(_describe_entry(each, contest) for each in contest.entries),
        steps_planned=inputs.trajectory.steps,
        models=_describe_models(inputs),
        data=_describe_data(inputs, data, contest.recipe.data.reference),
        also=_describe_data(inputs, inputs.also, str(inputs.given.also_data)) if inputs.also else None,
        recipe=contest.recipe.to_dict(),
        head={"policy": inputs.heads.policy, "why": inputs.heads.why, "tensors": list(inputs.comparison.head)},
        graph=_describe_graph(contest),
        permutation=PermutationFacts(
            best.permutation.moved if best and best.permutation else 0.0, given is not None, _name_origin(given)
        ),
        relation=inputs.relation,
        gates=contest.look_at_gates(),
        matching_lead=measure_lead(winner.test, unmatched.test) if unmatched else None,
        targets=contest.targets,
        labelled=data.labelled,
        flipped=_list_flipped(contest),
        matching=best.fit if best else {},
        batchnorm=best.batchnorm if best else {},
        adapter=adapter,
        samples=samples,
        notes=(*inputs.comparison.notes, *data.notes, *data.broken_notes, *contest.notes, *_warn_of_seen(contest)),
        run=key,
        **describe_course(run),
    )
    if choose_action(document) == KEEP:
        start = document.verdict.rpartition("; ")[0]
        document = replace(document, verdict=f"{start}; keep the tuned model, which is clearly ahead.")
    return hide_paths(document)


def describe_course(run: Run) -> dict[str, Any]:
    """Fields of a document that describe its run."""
    versions = list_versions()
    return {
        "format": FORMAT,
        "version": versions["hf-retarget"],
        "device": {
            "type": run.accelerator.device.type,
            "precision": run.precision,
            "processes": run.accelerator.num_processes,
            "threads": torch.get_num_threads(),
        },
        "seconds": {name: round(value, 3) for name, value in run.clock.seconds.items()},
        "memory": dict(run.clock.memory),
        "peak_memory": peak_memory(),
        "command": run.command,
        "versions": versions,
    }


def hide_paths(document: PortDocument) -> PortDocument:
    """Strip local paths from a document, and normalise it as if read from a file."""
    return parse_document(shorten_all(parse_json(to_json(document.to_json()))))


def _describe_entry(entry: Entry, contest: Contest) -> ContenderFigures:
    made, tuned = entry.made, contest.original
    return ContenderFigures(
        name=entry.contender.name,
        role=entry.role,
        gradients=made.gradients,
        validation=made.validation.top1,
        test=_describe_score(entry.test, entry is contest.result),
        forwards=_count_forwards(entry, contest),
        detail=made.detail,
        also=_describe_score(entry.also, False) if entry.also else None,
        flips=count_flips(tuned.test, entry.test) if tuned and entry is not tuned else None,
        lead=measure_lead(contest.result.test, entry.test) if entry is not contest.result else None,
        best_step=made.best.step if made.best and made.steps else None,
        steps=made.steps,
        curve=made.curve,
        seconds=round(entry.seconds, 3),
    )


def _count_forwards(entry: Entry, contest: Contest) -> float:
    """Forward-only minibatches of a contender, including those of the entry it refits."""
    if entry.made.curve and not entry.made.steps:
        return 0.0  # it was trained, which is priced in gradients
    refitted, recipe = contest.find(entry.contender.refits), contest.recipe
    images = entry.contender.forwards(
        count_images(contest.inputs).sizes(recipe, len(entry.made.steps), auto=contest.is_auto)
    )
    return images / recipe.port.batch_size + (_count_forwards(refitted, contest) if refitted else 0.0)


def _describe_score(score: Score, in_detail: bool) -> ScoreFigures:
    confusion = score.confusion if in_detail else None
    return ScoreFigures(score.top1, score.top5, score.loss, score.count, score.per_class, confusion)


def _describe_data(inputs: Inputs, data: ImageData, reference: str) -> DataFacts:
    return DataFacts(
        name=data.name,
        classes=inputs.classes,
        images={name: len(getattr(data, name)) for name in ("train", "validation", "test")},
        fingerprint=data.fingerprint,
        location=identify(reference),
        revision=data.revision,
        labels=inputs.labels,
        preprocess=inputs.preprocess.facts,
        made=inputs.preprocess.sentence,
    )


def _list_flipped(contest: Contest) -> dict[str, tuple[int, ...]]:
    """Numbers of the test images on which the result and the tuned model disagree."""
    tuned, test = contest.original, contest.inputs.data.test
    if tuned is None:
        return {}
    read = [number for number in range(len(test)) if number not in test.broken]
    pairs = list(zip(read, tuned.test.right, contest.result.test.right, strict=True))
    return {
        "negative": tuple(number for number, before, after in pairs if before and not after)[:_MOST_FLIPPED],
        "positive": tuple(number for number, before, after in pairs if after and not before)[:_MOST_FLIPPED],
    }


def _warn_of_seen(contest: Contest) -> list[str]:
    """Warn if the tuned model is better on validation than on test images, so was probably trained on the former."""
    tuned = contest.original
    if tuned is None or contest.judges_by_agreement:
        return []
    seen, new = tuned.made.validation, tuned.test
    error = math.sqrt(sum(each.top1 * (1 - each.top1) / each.count for each in (seen, new)))
    if seen.top1 - new.top1 <= 2 * error:
        return []
    return [
        f"the tuned model has {percent(seen.top1)} of the images to choose by right, but {percent(new.top1)} of the "
        "test images: it was probably trained on the former, which favours ports of its fine-tuning; name images that "
        "it has not seen with --data-validation-split"
    ]


def _describe_models(inputs: Inputs) -> dict[str, ModelFacts]:
    sides = {"source": inputs.source, "tuned": inputs.tuned, "target": inputs.target}
    if inputs.tuned_target is not None:
        sides["tuned_target"] = inputs.tuned_target
    return {name: replace(side.facts, location=identify(side.reference)) for name, side in sides.items()}


def _describe_graph(contest: Contest) -> dict[str, Any]:
    if not contest.is_traced:
        return {}
    graph, check = contest.traced.graph, contest.traced.verification
    return {
        "groups": len(graph.groups),
        "fingerprint": graph.fingerprint,
        "share_on_a_free_axis": graph.share(1),
        "held": list(contest.traced.held),
        "unknown_operators": [str(each) for each in graph.unknown_operators],
        "check": check.to_json() if check else None,
    }


def _name_origin(given: Any) -> str | None:
    if not isinstance(given, (str, Path)):
        return None
    path = Path(given).expanduser().resolve()
    return path.name if path.is_dir() else path.parent.name


# ---- sample images


def choose_samples(contest: Contest) -> tuple[dict[str, Any], dict[int, bytes]]:
    """Draw test images on which the result and its rival agree or disagree, with their thumbnails."""
    options, test = contest.recipe.port, contest.inputs.data.test
    ours = contest.result
    others = [each for each in contest.entries if each.role == BESIDE]
    theirs = (
        contest.original  # where they disagree, an image flips
        or next((each for each in others if each.contender.is_alternative), None)
        or contest.find(contest.winner.contender.without_matching)
    )
    kinds: dict[str, list[tuple[int, dict[str, Any]]]] = {kind: [] for kind in KINDS}
    read = (number for number in range(len(test)) if number not in test.broken)  # a broken one has no prediction
    for number, one, two in zip(read, ours.test.predictions, (theirs or ours).test.predictions, strict=False):
        label = int(test.targets[number])
        said = {ours.contender.name: one} | ({theirs.contender.name: two} if theirs else {})
        right = (one == label, two == label)
        kind = {(True, True): "both", (True, False): "only ours", (False, True): "only theirs"}.get(right, "neither")
        kinds[kind].append((number, {"number": number, "label": label, "predictions": said, "kind": kind}))
    chosen: list[dict[str, Any]] = []
    thumbnails: dict[int, bytes] = {}
    present = [kind for kind in KINDS if kinds[kind]]
    for place, kind in enumerate(present):
        share = (options.samples - len(chosen)) // (len(present) - place)
        draw = random.Random(derive_seed(options.seed, "samples", kind))
        for number, facts in sorted(draw.sample(kinds[kind], min(share, len(kinds[kind]))), key=lambda each: each[0]):
            if (picture := _make_thumbnail(test, number)) is not None:
                thumbnails[number] = picture
                chosen.append(facts)
    facts = {
        "ours": ours.contender.name,
        "theirs": theirs.contender.name if theirs else None,
        "rule": _RULE,
        "counts": {kind: len(each) for kind, each in kinds.items()},
        "images": chosen,
    }
    return facts, thumbnails


def _make_thumbnail(test: Split, number: int) -> bytes | None:
    """A small PNG or JPEG of an image; None if it cannot be made."""
    try:
        image = test.image(number)
        small = image.convert("L" if image.mode in ("1", "L") else "RGB")
        small.thumbnail((_SIDE, _SIDE))
        exact = _encode(small, format="PNG")
        return exact if len(exact) <= _SMALL else min(exact, _encode(small, format="JPEG", quality=80), key=len)
    except Exception:  # decoders may raise anything
        return None


def _encode(image: Image, **how: Any) -> bytes:
    image.save(buffer := io.BytesIO(), **how)
    return buffer.getvalue()

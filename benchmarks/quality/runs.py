"""The matrix: a run is a task, a method and a seed; finished runs are kept."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import hf_retarget as rt
from hf_retarget.document import read_document
from hf_retarget.errors import RetargetError
from hf_retarget.files import hash_file
from quality.bench import Bench, weights_of
from quality.curves import climb, follow, row_of
from quality.store import Kept, short_hash
from quality.task import TWISTS, Pair, Training
from quality.tasks import TASKS

RECORDS = Path(__file__).resolve().parents[1] / "results" / "quality"
PRICED = ("fgmt", "fgmt-sign")
"""Methods compared with plain fine-tuning at the same price; that of GMT would pay for a whole training."""


@dataclass(frozen=True)
class Run:
    """One cell of the matrix."""

    bench: Bench
    method: str
    """The method with its variants: `fgmt+cosine`."""
    seed: int

    @property
    def kept(self) -> Kept:
        """The folder of the port."""
        task = self.bench.task
        return Kept(self.bench.out / task.name / "runs" / self.method / f"seed-{self.seed}")

    @property
    def pair(self) -> Pair:
        """The two bases."""
        return self.bench.task.pair(self.seed)

    def overrides(self) -> dict[str, Any]:
        """The recipe of the port."""
        method, *twists = self.method.split("+")
        values: dict[str, Any] = {"port.method": method, "port.seed": self.seed, "port.verify": self.seed == 0}
        for twist in twists:
            values |= TWISTS[twist]
        return values

    def port(self) -> dict[str, Any]:
        """Port, or find the finished port; rt.port resumes if it was killed."""
        bench, pair = self.bench, self.pair
        old, new = bench.base(pair.old), bench.base(pair.new)
        source, direct = bench.tuned(pair.old, pair.old_seed), self.direct()
        method, *twists = self.method.split("+")
        actual = "actual" in twists
        plan = bench.recipe.override(**self.overrides())
        key: dict[str, Any] = {
            "recipe": plan.to_dict(),
            "actual": actual,
            "old": short_hash(old.state_dict()),
            "new": short_hash(new.state_dict()),
            "source": short_hash(weights_of(source)),
            "direct": short_hash(weights_of(direct)),
        }
        given: dict[str, Any] = {}
        if "borrowed" in twists:
            given["permutation"] = self._borrow(method)
            key["permutation"] = hash_file(given["permutation"] / "permutation.safetensors")
        if (done := self.kept.read(key)) is not None:
            return done
        bench.say(f"{bench.task.name}: {self.method}, seed {self.seed}")
        if actual:
            given["checkpoints"] = Path(source["folder"]) / "trajectory"
        if plan.port.head == "given":
            given["initial_head"] = Path(source["folder"]) / "initial_head.safetensors"
        began, unfinished = time.perf_counter(), self._open(key)
        ported = self.kept.folder / "ported"
        result = rt.port(
            old,
            bench.network(bench.classes, weights_of(source)),
            new,
            bench.pictures,
            recipe=plan,
            tuned_target=bench.network(bench.classes, weights_of(direct)),
            gradient_cache=bench.common / "gradients",
            out=ported,
            resume=unfinished,
            overwrite=not unfinished,
            command=f"python benchmarks/quality.py {bench.task.name} --method {self.method} --seed {self.seed}",
            **given,
        )
        facts = {"best_step": result.best_step, "seconds": round(time.perf_counter() - began, 1)}
        return self.kept.finish(key, facts)

    def _borrow(self, method: str) -> Path:
        """The port of another task with the same seed, whose permutation is reused."""
        lender = Run(replace(self.bench, task=TASKS[self.bench.task.lender]), method, self.seed)
        lender.port()
        return lender.kept.folder / "ported"

    def _open(self, key: dict[str, Any]) -> bool:
        """Clear the folder, unless a killed run with the same key can be resumed."""
        begun, text = self.kept.folder / "begun.json", json.dumps(key)
        if begun.exists() and begun.read_text("utf-8") == text:
            return (self.kept.folder / ".ported.work").exists()
        self.kept.begin()
        begun.write_text(text, "utf-8")
        return False

    @property
    def document(self) -> rt.PortDocument:
        """The run's port.json, possibly of an older version."""
        return read_document(self.kept.folder / "ported" / "port.json")

    def control(self) -> dict[str, Any] | None:
        """Plain fine-tuning at the same price, for methods that take gradients."""
        price = self.document.port.gradients
        if self.method.partition("+")[0] not in PRICED or not price:
            return None
        return self._climb([price], self.bench.task.batch)[0]

    def direct(self) -> dict[str, Any]:
        """The new base, fully fine-tuned."""
        return self.bench.tuned(self.pair.new, self.pair.new_seed)

    def plain(self) -> list[dict[str, Any]]:
        """The accuracy of the new base over steps of plain fine-tuning."""
        direct, task = self.direct(), self.bench.task
        return [row_of(direct, 0), *self._climb(task.budgets, task.tuning.batch), row_of(direct)]

    def _climb(self, budgets: Sequence[int], batch: int) -> list[dict[str, Any]]:
        def tune(pair: Pair, steps: int, lr: float) -> dict[str, Any]:
            return self.bench.tune(pair.new, pair.new_seed, lr, replace(self._shorter(steps), batch=batch))

        return climb(partial(tune, self.pair), partial(tune, self.bench.task.pair(0)), budgets, self._rates)

    def after(self) -> list[dict[str, Any]]:
        """The accuracy over steps of fine-tuning after the port; empty if it is not requested."""
        task = self.bench.task
        if self.seed >= task.after.get(self.method, 0):
            return []
        first = Run(self.bench, self.method, 0)
        rows = climb(self._after, first._after, task.budgets, self._rates)
        long = self._after(task.tuning.steps, self.direct()["lr"])
        return [row_of(long, 0), *rows, row_of(long)]

    @property
    def _rates(self) -> tuple[float, ...]:
        return self.bench.task.rates or self.bench.task.tuning.lrs

    def _shorter(self, steps: int) -> Training:
        return replace(self.bench.task.tuning, steps=steps)

    def _after(self, steps: int, lr: float) -> dict[str, Any]:
        bench, task, how = self.bench, self.bench.task, self._shorter(steps)
        self.port()
        weights = load_file(self.kept.folder / "ported" / "model.safetensors")
        seed = self.pair.new_seed  # the minibatches of plain fine-tuning of the new base
        key = {**bench._key(how, "ported"), "lr": lr, "seed": seed, "start": short_hash(weights)}
        whole = how == task.tuning
        length = "" if whole else f"-{steps}"
        kept = Kept(self.kept.folder.with_name(f"seed-{self.seed}-after{length}-lr-{lr:g}"))
        if (done := kept.read(key)) is None:
            bench.say(f"{task.name}: {self.method}, seed {self.seed}, {steps} steps after the port with lr {lr:g}")
            options = bench.recipe.override(**how.overrides(lr, seed)).finetune
            model, points = bench.network(bench.classes, weights), task.points if whole else (steps,)
            done = kept.finish(key, follow(model, bench.data, options, points, kept.begin(), gap=task.gap))
        return {**done, "folder": str(kept.folder)}


def list_runs(bench: Bench, methods: tuple[str, ...] = (), seeds: tuple[int, ...] = ()) -> Iterator[Run]:
    """The runs of a task, ordered by seed, so that an interrupted matrix has complete seeds."""
    for seed in range(bench.task.seeds):
        for method, count in bench.task.methods.items():
            if seed < count and (not methods or method in methods) and (not seeds or seed in seeds):
                yield Run(bench, method, seed)


def perform(run: Run) -> dict[str, Any]:
    """Do all work of a run, and collect its figures in summary.json."""
    done, bench, pair = run.port(), run.bench, run.pair
    document = run.document
    source, direct, control = bench.tuned(pair.old, pair.old_seed), run.direct(), run.control()
    after = run.after()
    summary = {
        "task": bench.task.name,
        "method": run.method,
        "seed": run.seed,
        "pair": vars(pair),
        "best_step": done["best_step"],
        "validation": [step.top1 for step in document.port.steps],
        "test": {
            "port": document.port.test.top1,
            "source": source["curve"][-1]["test"],
            "direct": direct["curve"][-1]["test"],
            "control": control["test"] if control else None,
        },
        "validation_direct": direct["curve"][-1]["validation"],
        "gradients": document.port.gradients,
        "price": document.port.gradients * bench.task.batch / bench.task.tuning.batch,
        "plain": _relative(run.plain(), bench.out) if after else [],
        "after": _relative(after, bench.out),
        "direct": Path(direct["folder"]).relative_to(bench.out).as_posix(),
        "lr": {"source": source["lr"], "direct": direct["lr"]},
        "head": document.head["policy"],
        "seconds": document.seconds | {"after": sum(row["seconds"] for row in after)},
    }
    paths = [run.kept.folder / "summary.json"]
    if bench.task.recorded:
        RECORDS.mkdir(parents=True, exist_ok=True)
        paths.append(RECORDS / f"{bench.task.name}.{run.method}.{run.seed}.json")
    for path in paths:
        path.write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    return summary


def _relative(rows: list[dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """Rows with the paths of their outputs, relative to the folder of all runs."""
    return [row | {"folder": Path(row["folder"]).relative_to(out).as_posix()} for row in rows]


def perform_all(runs: Iterator[Run]) -> list[str]:
    """Perform runs one after another; failures are reported, and the others continue."""
    failed = []
    for run in runs:
        try:
            perform(run)
        except RetargetError as error:
            failed.append(f"{run.bench.task.name}, {run.method}, seed {run.seed}: {error}")
            run.bench.say(failed[-1])
    return failed


def forget(out: Path, task: str, methods: tuple[str, ...] = ()) -> None:
    """Remove the ports of a task, but not the bases and fine-tunings."""
    folder = out / task / "runs"
    for each in [folder / method for method in methods] if methods else [folder]:
        shutil.rmtree(each, ignore_errors=True)


def load_summaries(out: Path) -> list[dict[str, Any]]:
    """All finished runs: those in a folder, and those with a committed record."""
    paths = [*sorted(RECORDS.glob("*.json")), *sorted(out.glob("*/runs/*/seed-*/summary.json"))]
    runs = [json.loads(path.read_text("utf-8")) for path in paths]
    return list({(run["task"], run["method"], run["seed"]): run for run in runs}.values())

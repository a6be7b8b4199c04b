"""Will a port pay? Rules that advise without images, evaluated on networks that they were not fitted on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from hf_retarget.advice import HEAD, PORTED, RETRAIN
from hf_retarget.evaluation.batchnorm import has_batchnorm
from hf_retarget.models.relation import INDEPENDENT, recommend
from quality.pairs import PAIRS
from quality.tasks import TASKS

WITHIN = 0.01
"""How far behind the best action an advice may be to count as right."""
THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0)


@dataclass(frozen=True)
class Case:
    """A pair of bases and a seed of the fine-tuning: the facts known beforehand, and the accuracy of each action."""

    network: str
    word: str
    drift: float
    batchnorm: bool
    test: dict[str, float]

    def lost(self, action: str) -> float:
        """How far an action is behind the best one, in points."""
        return 100 * (max(self.test.values()) - self.test[action])


Rule = Callable[[Case], str]


def by_relation(apart: str) -> Rule:
    """Port between bases of one lineage; one fixed action between independent ones."""
    return lambda case: apart if case.word == INDEPENDENT else PORTED


def by_drift(threshold: float) -> Rule:
    """Plain fine-tuning beyond a distance between the bases."""
    return lambda case: RETRAIN if case.drift > threshold else by_relation(HEAD)(case)


def by_drift_and_batchnorm(threshold: float) -> Rule:
    """The same, but only for networks with BatchNorm."""
    return lambda case: RETRAIN if case.drift > threshold and case.batchnorm else by_relation(HEAD)(case)


RULES: dict[str, Sequence[Rule]] = {
    "relation alone": [by_relation(HEAD), by_relation(RETRAIN)],
    "relation and distance": [by_drift(each) for each in THRESHOLDS],
    "relation, distance and BatchNorm": [by_drift_and_batchnorm(each) for each in THRESHOLDS],
    "relation's word and BatchNorm (`check`)": [lambda case: recommend(case.word, has_batchnorm=case.batchnorm)],
}
"""Families of rules; the best one of a family on all networks but one is evaluated on that one."""


def list_cases(runs: dict[tuple[str, str], list[dict[str, Any]]]) -> list[Case]:
    """All pairs and seeds with measurements of a free port, a closed-form head and 60 minibatches."""
    cases = []
    for (name, situation), records in runs.items():
        plain = {each["seed"]: each["test"] for each in runs.get((name, "plain-60"), ())}
        if situation != "labels":
            continue
        network = TASKS[PAIRS[name].task].network(2)
        for each in records:
            entered = each["contenders"]
            free = [entered[key] for key in ("naive-line", "naive-head") if key in entered]
            if "head" not in entered or each["seed"] not in plain:
                continue
            chosen = max(free, key=lambda one: one["validation"])
            test = {PORTED: chosen["test"], HEAD: entered["head"]["test"], RETRAIN: plain[each["seed"]]}
            cases.append(Case(type(network).__name__, each["word"], each["drift"], has_batchnorm(network), test))
    return cases


def judge_rules(cases: Sequence[Case]) -> dict[str, tuple[float, float]]:
    """For each family, points lost and share of right advice on networks left out of fitting."""
    found = {}
    for name, rules in RULES.items():
        lost = []
        for network in sorted({case.network for case in cases}):
            rest = [case for case in cases if case.network != network]
            best = min(rules, key=lambda rule: mean(case.lost(rule(case)) for case in rest))
            lost += [case.lost(best(case)) for case in cases if case.network == network]
        found[name] = mean(lost), mean(each <= 100 * WITHIN for each in lost)
    return found

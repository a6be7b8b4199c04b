"""The methods: each maps a problem and the state after s − 1 steps to the state after s steps.

They are registered in `hf_retarget/contenders.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from hf_retarget.contenders import contenders, find_contender
from hf_retarget.errors import MatchError
from hf_retarget.graph.permutation import Permutation
from hf_retarget.graph.permutation_graph import PermutationGraph
from hf_retarget.matching.descent import Match, descend
from hf_retarget.matching.fit import Cosines, cosines
from hf_retarget.matching.objective import Stacks, Tensors
from hf_retarget.matching.problem import Problem, State
from hf_retarget.matching.trajectory import transplant

Method = Callable[[Problem, State], State]


def run(name: str, problem: Problem, state: State | None = None) -> Iterator[State]:
    """Run a method step by step, from the beginning or from a saved state."""
    row, known = find_contender(name), sorted(each.name for each in contenders() if each.step)
    if not row.step:
        raise MatchError(f"unknown method '{name}'; choose one of {', '.join(known)}")
    step: Method = row.resolve(row.step)
    state = begin(problem) if state is None else state
    while state.step < problem.trajectory.steps:
        state = step(problem, state)
        yield state


def begin(problem: Problem) -> State:
    """The state before the first step, with the target's weights."""
    return State(0, problem.graph.identity(), dict(problem.target), problem.new_stacks())


def match(graph: PermutationGraph, target: Tensors, source: Tensors, **options: Any) -> Match:
    """Find the permutation that best maps `source` onto `target`: weights, gradients or deltas.

    Options are those of `hf_retarget.matching.descend`.
    """
    stacks = Stacks(graph)
    stacks.add(target, source)
    return descend(stacks, **options)


def _port(problem: Problem, state: State, found: Match, cosines: Cosines | None = None) -> State:
    # π_s is applied to the whole delta up to s, not to a running sum of steps with different permutations.
    step = state.step + 1
    weights = transplant(problem.target, problem.trajectory.delta(step), problem.graph, found.permutation)
    return _state(step, weights, state.stacks, found, cosines)


def _state(step: int, weights: Tensors, stacks: Stacks, found: Match, cosines: Cosines | None) -> State:
    objectives = tuple(sweep.objective for sweep in found.sweeps)
    return State(step, found.permutation, weights, stacks, found.objective, len(objectives), objectives, cosines)


def _cosines(problem: Problem, state: State, found: Match, target: Tensors, source: Tensors) -> Cosines:
    known = [state.permutation] if state.step else []  # nothing is matched before the first step
    before, *unseen, after = cosines(target, source, problem.graph, [*known, found.permutation])
    return Cosines(before, unseen[0] if unseen else None, after)


def fgmt(problem: Problem, state: State) -> State:
    """Fast gradient matching along the trajectory: one new pair of gradients per step, all pairs matched."""
    return _port(problem, state, *_match_gradients(problem, state, last_use=True)[:2])


def _match_gradients(problem: Problem, state: State, *, last_use: bool = False) -> tuple[Match, Cosines, Tensors]:
    # Also returns the new gradient of the target, rounded. With `last_use`, the state's weights leave memory.
    step = state.step + 1
    source = problem.source_gradient(step)  # first, as it needs more memory
    pair = [problem.gradient_at(state.weights, step), source]
    del source
    if last_use:
        state.weights = {}
    state.stacks.add(*pair)
    for side in (0, 1):  # half the memory during the search, and enough for signs and cosines
        left, pair[side] = dict(pair[side]), {}
        pair[side] = {name: left.pop(name).bfloat16() for name in list(left)}
    found = problem.solve(state.stacks, state.permutation)
    return found, _cosines(problem, state, found, *pair), pair[0]


def gmt(problem: Problem, state: State) -> State:
    """Gradient matching along the trajectory: every step recomputes all gradients, at the currently ported weights."""
    stacks = problem.new_stacks()
    for step in range(1, state.step + 2):
        delta = problem.trajectory.delta(step - 1)
        weights = transplant(problem.target, delta, problem.graph, state.permutation)
        target, source = problem.gradient_at(weights, step), problem.source_gradient(step)
        stacks.add(target, source)
    found = problem.solve(stacks, state.permutation)
    return _port(problem, replace(state, stacks=stacks), found, _cosines(problem, state, found, target, source))


def fgmt_sign(problem: Problem, state: State) -> State:
    """FGMT, keeping of each step only the entries that go downhill for the target."""
    found, cosines, gradient = _match_gradients(problem, state)
    weights = _step_downhill(problem, state, found.permutation, gradient)
    return _state(state.step + 1, weights, state.stacks, found, cosines)


def naive_sign(problem: Problem, state: State) -> State:
    """The identity, keeping only the entries that go downhill: the mask of `fgmt-sign` without matching."""
    step, identity = state.step + 1, problem.graph.identity()
    weights = _step_downhill(problem, state, identity, problem.gradient_at(state.weights, step))
    return _state(step, weights, state.stacks, Match(identity, 0.0, ()), None)


def _step_downhill(problem: Problem, state: State, permutation: Permutation, gradient: Tensors) -> Tensors:
    before, after = (dict(problem.trajectory.delta(step)) for step in (state.step, state.step + 1))
    moves = ((name, after.pop(name) - before.pop(name)) for name in state.weights)
    weights = {}
    for name, move in problem.graph.apply_each(permutation, moves):
        if name in gradient:
            move = torch.where(torch.sign(move) == -torch.sign(gradient[name]), move, 0.0)
        weights[name] = state.weights[name] + move
    return weights


def naive(problem: Problem, state: State) -> State:
    """The identity: add the fine-tuning unchanged."""
    return _port(problem, state, Match(problem.graph.identity(), 0.0, ()))


def oracle(problem: Problem, state: State) -> State:
    """The permutation between the fine-tuning and the actual fine-tuning of the target, if there is one."""
    if problem.tuned_target is None:
        raise MatchError("the method 'oracle' needs the actual fine-tuning of the new base (--tuned-target)")
    real = {name: problem.tuned_target[name] - start for name, start in problem.target.items()}
    return _once(problem, state, real, problem.trajectory.delta(problem.trajectory.steps))


def rebasin(problem: Problem, state: State) -> State:
    """The permutation between the weights of the two bases (Git Re-Basin)."""
    return _once(problem, state, problem.target, problem.source)


def permuted_source(problem: Problem, state: State) -> State:
    """The tuned source itself, permuted by FGMT: the difference to FGMT is what the target's own weights add."""
    before = problem.trajectory.delta(state.step)
    followed = replace(state, weights=transplant(problem.target, before, problem.graph, state.permutation))
    ported = fgmt(problem, followed)
    delta = problem.trajectory.delta(ported.step)
    tuned = {name: start + delta[name] for name, start in problem.source.items()}
    return replace(ported, weights=problem.graph.apply(ported.permutation, tuned))


def _once(problem: Problem, state: State, target: Tensors, source: Tensors) -> State:
    # These methods have a single permutation for all steps, found at the first.
    if state.step:
        return _port(problem, state, Match(state.permutation, state.objective, ()), state.cosines)
    stacks = problem.new_stacks()
    stacks.add(target, source)
    found = problem.solve(stacks, state.permutation)
    return _port(problem, state, found, _cosines(problem, state, found, target, source))

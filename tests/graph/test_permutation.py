"""Permutations: their laws, their action on tensors, and their files."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import hf_retarget as rt
from hf_retarget.models import empty_model, random_model

SEEDS = st.integers(0, 2**31)
few = settings(max_examples=15)


def grouped_net() -> nn.Module:
    """As in RegNet: a grouped convolution between pointwise ones; one group of channels inside another's blocks."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Conv2d(8, 12, 1),
        nn.BatchNorm2d(12),
        nn.Conv2d(12, 12, 3, groups=3),
        nn.Conv2d(12, 8, 1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


class Nested(nn.Module):
    """Heads within heads: x[a, b, c] · w[a, b, c], where c varies over a and b, and b over a."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.rand(3, 4, 5))
        self.right = nn.Parameter(torch.rand(3, 4, 5))
        self.outer = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.left.tanh() * self.right).sum((1, 2)).tanh() * self.outer).sum() * x.sum()


MODELS = {
    "vit": lambda: (random_model("test_vit"), None),
    "grouped": lambda: (grouped_net(), torch.zeros(2, 3, 5, 5)),
    "nested": lambda: (Nested(), torch.zeros(2)),
    "resnet": lambda: (random_model("test_resnet"), None),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request) -> tuple[nn.Module, rt.PermutationGraph]:
    model, example = MODELS[request.param]()
    return model, rt.trace(model, example)


@pytest.fixture(scope="module")
def grouped() -> tuple[nn.Module, rt.PermutationGraph]:
    model, example = MODELS["grouped"]()
    return model, rt.trace(model, example)


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_example_models_have_blocks_and_segments():
    nested = rt.trace(*MODELS["nested"]())
    assert sorted(group.shape for group in nested) == [(3,), (3, 4), (3, 4, 5)]
    grouped = rt.trace(*MODELS["grouped"]())
    assert sorted(group.shape for group in grouped) == [(3,), (3, 4), (3, 4), (8,), (8,)]


# ---------------------------------------------------------------------- laws


@few
@given(seed=SEEDS)
def test_a_permutation_and_its_inverse_are_the_identity(case, seed):
    _, graph = case
    permutation = graph.random(seed)
    assert graph.compose(permutation, graph.invert(permutation)) == graph.identity()
    assert graph.compose(graph.invert(permutation), permutation) == graph.identity()
    assert graph.invert(graph.invert(permutation)) == permutation


@few
@given(seeds=st.tuples(SEEDS, SEEDS))
def test_composing_equals_applying_in_sequence(case, seeds):
    model, graph = case
    first, second = map(graph.random, seeds)
    state = model.state_dict()
    once = graph.apply(graph.compose(first, second), state)
    assert equal(once, graph.apply(second, graph.apply(first, state)))


@few
@given(seeds=st.tuples(SEEDS, SEEDS, SEEDS))
def test_composing_is_associative(case, seeds):
    _, graph = case
    a, b, c = map(graph.random, seeds)
    assert graph.compose(graph.compose(a, b), c) == graph.compose(a, graph.compose(b, c))


def test_the_identity_moves_nothing(case):
    model, graph = case
    state = model.state_dict()
    assert equal(graph.apply(graph.identity(), state), state)
    permutation = graph.random(3)
    assert graph.compose(graph.identity(), permutation) == permutation == graph.compose(permutation, graph.identity())


def test_the_inverse_restores_the_weights(case):
    model, graph = case
    permutation, state = graph.random(7), model.state_dict()
    moved = graph.apply(permutation, state)
    assert not equal(moved, state)
    assert equal(graph.apply(graph.invert(permutation), moved), state)


def test_random_is_determined_by_its_seed(case):
    _, graph = case
    torch.manual_seed(1)
    first = graph.random(5)
    torch.manual_seed(2)
    assert graph.random(5) == first
    assert graph.random(6) != first


def test_random_gives_permutations(case):
    _, graph = case
    for name, index in graph.random(0).indices.items():
        assert torch.equal(index.sort(-1).values, graph.identity()[name])


def test_a_permutation_is_read_like_a_mapping(case):
    _, graph = case
    permutation = graph.random(0)
    assert list(permutation) == [group.name for group in graph]
    assert all(permutation[group.name].shape == group.shape for group in graph)
    assert f"{len(graph)} groups" in repr(permutation)
    assert "0 of" in repr(graph.identity())


# ---------------------------------------------------------------------- acting on tensors


def test_indices_gather():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    graph = rt.trace(model, torch.zeros(1, 2))
    permutation = rt.Permutation(graph.fingerprint, {"0": torch.tensor([2, 0, 1])})
    moved = graph.apply(permutation, model.state_dict())
    assert torch.equal(moved["0.bias"], model[0].bias[[2, 0, 1]])
    assert torch.equal(moved["0.weight"], model[0].weight[[2, 0, 1]])
    assert torch.equal(moved["1.weight"], model[1].weight[:, [2, 0, 1]])
    assert torch.equal(moved["1.bias"], model[1].bias)


def test_rows_of_an_inner_permutation_are_addressed_by_the_new_position(grouped):
    model, graph = grouped
    (blocks,) = [group for group in graph if group.name.endswith("/blocks")]
    first, second = [group for group in graph if group.blocks]
    assert first.outer == second.outer == (blocks.name,)
    permutation = graph.random(0)
    moved = graph.apply(permutation, {"1.bias": model[1].bias})["1.bias"].view(3, 4)
    old = model[1].bias.view(3, 4)
    inner = next(group for group in (first, second) if rt.Axis("1.bias", 0) in group.axes)
    for h in range(3):
        for d in range(4):
            assert moved[h, d] == old[permutation[blocks.name][h], permutation[inner.name][h, d]]


def test_a_subset_of_tensors_can_be_permuted(case):
    model, graph = case
    permutation, state = graph.random(0), model.state_dict()
    name = next(iter(state))
    some = graph.apply(permutation, {name: state[name]})
    assert list(some) == [name]
    assert torch.equal(some[name], graph.apply(permutation, state)[name])


def test_gradients_are_permuted_like_weights(grouped):
    model, graph = grouped
    x = torch.rand(2, 3, 5, 5)
    permutation = graph.random(0)

    def gradients(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        twin = grouped_net().double().eval()
        twin.load_state_dict(state)
        twin(x.double()).square().sum().backward()
        return {name: parameter.grad for name, parameter in twin.named_parameters()}

    state = model.state_dict()
    moved, expected = graph.apply(permutation, gradients(state)), gradients(graph.apply(permutation, state))
    for name in expected:
        torch.testing.assert_close(moved[name], expected[name], rtol=1e-9, atol=1e-9)


def test_arguments_are_not_modified(case):
    model, graph = case
    state = model.state_dict()
    copies = {name: tensor.clone() for name, tensor in state.items()}
    moved = graph.apply(graph.random(0), state)
    assert equal(state, copies)
    assert not any(moved[name].data_ptr() == state[name].data_ptr() for name in state if state[name].numel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_the_dtype_is_kept(grouped, dtype):
    model, graph = grouped
    weight = (model[0].weight.detach() * 100).to(dtype)
    moved = graph.apply(graph.random(0), {"0.weight": weight})["0.weight"]
    assert moved.dtype is dtype
    assert torch.equal(moved.double(), graph.apply(graph.random(0), {"0.weight": weight.double()})["0.weight"])


def test_the_device_is_kept(grouped):
    _, graph = grouped
    moved = graph.apply(graph.random(0), {"0.weight": torch.empty(8, 3, 3, 3, device="meta")})
    assert moved["0.weight"].is_meta


def test_memory_order_does_not_matter(grouped):
    model, graph = grouped
    weight = model[0].weight.detach()
    expected = graph.apply(graph.random(0), {"0.weight": weight})["0.weight"]
    last = weight.to(memory_format=torch.channels_last)
    assert not last.is_contiguous()
    view = torch.cat([weight, weight])[8:]  # starts in the middle of its memory
    for other in (last, view):
        assert torch.equal(graph.apply(graph.random(0), {"0.weight": other})["0.weight"], expected)


# ---------------------------------------------------------------------- mismatches


def test_a_permutation_of_another_graph_is_refused(grouped):
    _, graph = grouped
    other = rt.trace(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), torch.zeros(1, 2)).random(0)
    for use in (
        lambda: graph.apply(other, {}),
        lambda: graph.invert(other),
        lambda: graph.compose(graph.random(0), other),
    ):
        with pytest.raises(rt.GraphMismatchError, match=graph.fingerprint[:12]) as error:
            use()
        assert other.fingerprint[:12] in str(error.value)


def test_an_unknown_tensor_is_named(grouped):
    _, graph = grouped
    with pytest.raises(rt.TensorMismatchError, match=r"'head\.weight' is not a parameter"):
        graph.apply(graph.random(0), {"head.weight": torch.zeros(3)})


def test_a_tensor_of_the_wrong_shape_is_named(grouped):
    _, graph = grouped
    with pytest.raises(rt.TensorMismatchError, match=r"'6\.weight' has shape \[5, 9\], the graph expects \[5, 8\]"):
        graph.apply(graph.random(0), {"6.weight": torch.zeros(5, 9)})


def test_an_incomplete_permutation_is_refused(grouped):
    _, graph = grouped
    indices = dict(graph.random(0).indices)
    name, index = indices.popitem()
    with pytest.raises(rt.PermutationError, match=f"'{name}' is missing"):
        graph.apply(rt.Permutation(graph.fingerprint, indices), {})
    with pytest.raises(rt.PermutationError, match=f"'{name}' has shape"):
        graph.apply(rt.Permutation(graph.fingerprint, {**indices, name: index[..., 1:]}), {})


@pytest.mark.parametrize("wrong", [[0, 0, 1], [0, 1, 3], [-1, 0, 1]])
def test_an_index_that_is_no_permutation_is_refused(wrong):
    graph = rt.trace(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), torch.zeros(1, 2))
    with pytest.raises(rt.PermutationError, match="'0'"):
        graph.apply(rt.Permutation(graph.fingerprint, {"0": torch.tensor(wrong)}), {"0.bias": torch.rand(3)})


# ---------------------------------------------------------------------- fingerprints and files


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_fingerprint_is_the_same_in_every_trace(build):
    assert rt.trace(*build()).fingerprint == rt.trace(*build()).fingerprint


def test_the_fingerprint_needs_no_weights():
    assert rt.trace(empty_model("test_vit")).fingerprint == rt.trace(random_model("test_vit")).fingerprint


def test_the_fingerprint_distinguishes_models():
    graphs = [rt.trace(*build()) for build in MODELS.values()]
    graphs.append(rt.trace(random_model("test_vit", num_classes=7)))
    assert len({graph.fingerprint for graph in graphs}) == len(graphs) == len(set(graphs))


def test_a_graph_round_trips_through_its_file(case, tmp_path):
    model, graph = case
    graph.save(tmp_path / "graph.json")
    loaded = rt.PermutationGraph.load(tmp_path / "graph.json")
    assert loaded == graph
    assert (loaded.groups, loaded.pinned, loaded.unknown_operators) == (
        graph.groups,
        graph.pinned,
        graph.unknown_operators,
    )
    assert (loaded.parameters, loaded.share(1), loaded.share(2)) == (graph.parameters, graph.share(1), graph.share(2))
    state, permutation = model.state_dict(), graph.random(0)
    assert equal(loaded.apply(permutation, state), graph.apply(permutation, state))
    assert loaded.invert(permutation) == graph.invert(permutation)


def test_a_permutation_round_trips_through_its_file(case, tmp_path):
    _, graph = case
    permutation = graph.random(0)
    permutation.save(tmp_path / "permutation.safetensors")
    assert rt.Permutation.load(tmp_path / "permutation.safetensors") == permutation


def test_files_are_written_atomically(grouped, tmp_path):
    _, graph = grouped
    broken = rt.Permutation(graph.fingerprint, {"0": "no tensor"})
    with pytest.raises(AttributeError):
        broken.save(tmp_path / "permutation.safetensors")
    assert list(tmp_path.iterdir()) == []


def write_text(path):
    path.write_text("{no json")


def write_json(path):
    path.write_text(json.dumps({"format": "something else"}))


def write_list(path):
    path.write_text("[]")


def write_binary(path):
    path.write_bytes(b"\x93\xff" * 30)


def write_nothing(path):
    path.write_bytes(b"")


def write_weights(path):
    save_file({"fc.weight": torch.zeros(2)}, path)


def write_no_file(path):
    path.unlink(missing_ok=True)


def write_folder(path):
    path.mkdir()


BROKEN = [write_text, write_json, write_list, write_binary, write_nothing, write_weights, write_no_file, write_folder]


@pytest.mark.parametrize("kind", [rt.Permutation, rt.PermutationGraph])
@pytest.mark.parametrize("write", BROKEN)
def test_an_unrelated_file_is_refused(kind, write, tmp_path):
    path = tmp_path / "file"
    write(path)
    with pytest.raises(rt.PermutationError, match=str(path)):
        kind.load(path)


@pytest.mark.parametrize("missing", ["groups", "layouts", "tied"])
def test_a_graph_file_with_a_part_missing_is_refused(grouped, tmp_path, missing):
    _, graph = grouped
    path = tmp_path / "graph.json"
    document = graph.to_json()
    del document[missing]
    path.write_text(json.dumps(document))
    with pytest.raises(rt.PermutationError, match=str(path)):
        rt.PermutationGraph.load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda graph: graph["groups"][0].update(size="8"), "valid integer.*groups.0.size"),
        (lambda graph: graph["groups"][0].update(size=0), "group .* has impossible sizes"),
        (lambda graph: graph["groups"][0].update(outer=["nobody"]), "group .* has impossible sizes"),
        (
            lambda graph: graph["layouts"].update(w=[[3], [[0, [[3, 1, 0, "nobody", []]]]]]),
            "layout of 'w' is impossible",
        ),
        (lambda graph: graph["layouts"].update(w=[[3], [[3, [[1, 1, 0, None, []]]]]]), "layout of 'w' is impossible"),
        (lambda graph: graph["layouts"].update(w=[[3], [[0, [[3, -1, 0, None, []]]]]]), "layout of 'w' is impossible"),
        (lambda graph: graph["layouts"].update(w=[[3], [[0, [[3, 1]]]]]), "required.*layouts.w"),
        (lambda graph: graph.update(tied={"a": 5}), "valid string.*tied.a"),
    ],
)
def test_a_graph_file_with_an_impossible_value_is_refused(grouped, tmp_path, change, words):
    document = json.loads(json.dumps(grouped[1].to_json()))
    change(document)
    (tmp_path / "graph.json").write_text(json.dumps(document))
    with pytest.raises(rt.PermutationError, match=f"is damaged: .*{words}"):
        rt.PermutationGraph.load(tmp_path / "graph.json")


def test_a_permutation_file_without_a_fingerprint_is_refused(tmp_path):
    path = tmp_path / "permutation.safetensors"
    save_file({"0": torch.arange(3)}, path, {"format": "hf-retarget/permutation/1"})
    with pytest.raises(rt.PermutationError, match=str(path)):
        rt.Permutation.load(path)


def test_a_graph_is_json(case):
    _, graph = case
    assert json.loads(json.dumps(graph.to_json()))["format"] == "hf-retarget/permutation-graph/1"

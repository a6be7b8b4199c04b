"""Whatever is in a file, it is read as it stands or refused: never a traceback, never another meaning."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from faults.limits import limited
from faults.weights import join, split
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from loopback_hub import Fault, Hub
from safetensors.torch import load_file

import hf_retarget as rt
from hf_retarget.comparison import FinishedPort
from hf_retarget.document import read_document
from hf_retarget.errors import RetargetError
from hf_retarget.files import load_record, load_tensors, save_record, save_tensors
from hf_retarget.graph import Permutation, PermutationGraph, load_graph
from hf_retarget.matching.gradients import GradientCache
from hf_retarget.models import load_checkpoint, peek_checkpoint, save_model
from hf_retarget.models.weights import SAFE, find_tensors, read_weights, weight_files
from hf_retarget.porting.result import PortResult
from hf_retarget.provenance import check_port
from hf_retarget.recipe import Recipe, load_recipe
from hf_retarget.recipe.recipe import SECTIONS, fields

# Nothing is shrunk: that takes minutes where an example takes a second, and a failure names its file in any case.
FEW = settings(
    max_examples=60,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FEWER = settings(FEW, max_examples=25)

NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**30, 0.5, -0.5, 1e300, -0.0]),
    st.integers(-5, 300),
    st.floats(allow_nan=False, allow_infinity=False),
)
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["../x", "\x00", "\ud800"]))
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6)  # fmt: skip


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all entries of a document."""
    entries = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, value in entries:
        yield (*path, name)
        yield from places(value, (*path, name))


def altered(data: st.DataObject, document: Any, times: int = 2) -> Any:
    """A document of which one or two entries are gone, or of another value."""
    changed = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, times))):
        found = list(places(changed))
        if not found:
            break
        *above, name = data.draw(st.sampled_from(found))
        inner = changed
        for each in above:
            inner = inner[each]
        if data.draw(st.booleans()) or data.draw(st.booleans()):
            inner[name] = data.draw(VALUES)
        else:
            del inner[name]
    return changed


def write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document))


def attempt(read: Callable[[], Any], *words: str) -> Any:
    """What reading gives, or None if it was refused in one line with one of these words."""
    try:
        with limited():
            return read()
    except RetargetError as error:
        said = str(error)
    assert not words or any(word in said for word in words), said
    return None


# ---- recipes


@given(st.data())
@FEW
def test_recipes(tmp_path, data):
    known = [*SECTIONS, "name", "description", "presets", "port.steps"]
    section = st.dictionaries(
        st.sampled_from([each.name for each in fields()]) | st.text(max_size=4), VALUES, max_size=3
    )
    document = data.draw(st.dictionaries(st.sampled_from(known) | st.text(max_size=4), section | VALUES, max_size=3))
    path = tmp_path / "mine.yaml"
    write(path, document)  # JSON is YAML
    recipe = attempt(lambda: load_recipe(path), str(path))
    if recipe is not None:
        recipe.save(path)
        assert load_recipe(path) == recipe == Recipe.from_dict(recipe.to_dict())


@given(st.text(max_size=60) | st.text(alphabet="{}[]:,&*!|>-? \n\t'\"#%@`a1.e", max_size=40))
@FEW
def test_recipes_of_any_text(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    attempt(lambda: load_recipe(path), str(path))


# ---- models


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    net = timm.create_model("test_resnet", num_classes=3, in_chans=1)
    return save_model(tmp_path_factory.mktemp("models") / "model", net.state_dict(), load_checkpoint(net))


@given(st.data())
@FEWER
def test_configurations(tmp_path_factory, model, data):
    folder = shutil.copytree(model, tmp_path_factory.mktemp("changed") / "model")
    write(folder / "config.json", altered(data, json.loads((model / "config.json").read_text())))
    found = attempt(lambda: load_checkpoint(folder), "config.json", "model")
    if found is None:
        return
    stored = load_file(model / SAFE)
    assert found.weights.keys() == stored.keys()
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in stored.items())


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "I64", "F99", 3, None]),
        "shape": st.lists(st.sampled_from([0, 1, 2, -1, 2**62, 2**64, 1.5, "2"]), max_size=3) | VALUES,
        "data_offsets": st.lists(st.sampled_from([0, 4, 8, -4, 2**40, 2**63, 2**64, 0.5, "4"]), max_size=3) | VALUES,
    },
)
HEADER = st.dictionaries(st.sampled_from(["a", "b", "__metadata__", "../x", ""]), ENTRY | VALUES, max_size=3)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A safetensors file with a header of our making, and a length that may be another one."""
    text = json.dumps(draw(HEADER | VALUES)).encode()
    text = draw(st.sampled_from([text, text + b" ", text[:-1], b"\xff" + text, text.replace(b"F32", b"F\xff2")]))
    length = draw(st.sampled_from([None, None, None, 0, 7, 2**20, 2**31, 2**63, 2**64 - 1]))
    return join(text, bytes(draw(st.integers(0, 16))), length)


@given(files())
@settings(FEW, max_examples=150)
def test_headers(tmp_path, content):
    path = tmp_path / SAFE
    path.write_bytes(content)
    stored = attempt(lambda: read_weights([path]), SAFE, "no tensors")
    if stored is None:
        return
    found = stored.weights
    header, data = split(path)
    header.pop("__metadata__", None)
    assert found.keys() == header.keys()
    assert sum(each.numel() * each.element_size() for each in found.values()) == len(data)


@given(st.data())
@FEWER
def test_indices(tmp_path, model, data):
    tensors = load_file(model / SAFE)
    (tmp_path / "a.safetensors").write_bytes((model / SAFE).read_bytes())
    index = {"metadata": {}, "weight_map": dict.fromkeys(list(tensors)[:4], "a.safetensors")}
    write(tmp_path / "model.safetensors.index.json", altered(data, index))
    with limited(), pytest.raises(RetargetError, match=r"index\.json|lacks"):  # most tensors are missing in any case
        weight_files(tmp_path, str(tmp_path))


@pytest.mark.parametrize("count", [300_000, 10_000_000])
def test_a_header_of_many_entries(tmp_path, count):
    path = tmp_path / SAFE
    entries = ",".join(f'"{n:07}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for n in range(300_000))
    with path.open("wb") as file:
        file.write((len(entries) * count // 300_000 + 2).to_bytes(8, "little") + b"{" + entries.encode() + b"}")
        file.truncate(8 + len(entries) * count // 300_000 + 2)
    with limited():
        attempt(lambda: read_weights([path]), "bytes")
        attempt(lambda: find_tensors([path]), "bytes")


# ---- the same on the Hub, which may ignore that only a part was asked for


@pytest.fixture(scope="module")
def hosted(tmp_path_factory) -> Iterator[Hub]:
    with Hub(tmp_path_factory.mktemp("hub")) as hub:
        hub.add_user("ada")
        yield hub


@given(content=files(), whole=st.booleans())
@settings(FEWER, max_examples=20)
def test_headers_on_the_hub(connected, model, content, whole):
    names = {"config.json": model / "config.json", SAFE: content}
    _peek(connected, names, whole)


@given(data=st.data(), whole=st.booleans())
@settings(FEWER, max_examples=12)
def test_changed_headers_on_the_hub(connected, model, data, whole):
    header, numbers = split(model / SAFE)
    names = {"config.json": model / "config.json", SAFE: join(altered(data, header), numbers)}
    _peek(connected, names, whole)


def _peek(hub: Hub, names: dict[str, Any], whole: bool) -> None:
    hub.repository("ada/model", names)
    hub.faults.clear()
    if whole:
        hub.inject(Fault("*", "GET", SAFE, times=None, ignore_range=True))
        hub.inject(Fault("lfs_get", "GET", times=None, ignore_range=True))
    attempt(lambda: peek_checkpoint("ada/model"), "ada/model", SAFE)


# ---- permutations and graphs


@pytest.fixture(scope="module")
def graph() -> PermutationGraph:
    return rt.trace(timm.create_model("test_vit", num_classes=3))


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return timm.create_model("test_vit", num_classes=3).state_dict()


@given(data=st.data())
@FEW
def test_permutations(tmp_path, graph, weights, data):
    honest = graph.random(0)
    facts: Any = {"format": "hf-retarget/permutation/1", "fingerprint": graph.fingerprint}
    indices = dict(honest.indices)
    name = data.draw(st.sampled_from([*indices, "nosuch"]))
    if data.draw(st.booleans()):
        like = indices.get(name, torch.arange(4))
        change = data.draw(st.sampled_from([torch.Tensor.float, torch.Tensor.int, torch.Tensor.char, torch.zeros_like]))
        indices[name] = change(like) + data.draw(st.sampled_from([0, 1, -1]))
        if data.draw(st.booleans()):
            indices[name] = indices[name][..., : data.draw(st.integers(0, 3))]
    else:
        indices.pop(name, None)
    save_tensors(tmp_path / "p.safetensors", indices, data.draw(st.sampled_from([facts, facts, altered(data, facts)])))
    found = attempt(lambda: Permutation.load(tmp_path / "p.safetensors"))
    if found is not None and attempt(lambda: graph.apply(found, weights)) is not None:
        assert all(found[group].equal(index) for group, index in honest.indices.items())


@given(data=st.data())
@FEW
def test_graphs(tmp_path, graph, weights, data):
    path = tmp_path / "graph.json"
    write(path, altered(data, graph.to_json()))
    _use_graph(path, weights)


@given(data=st.data())
@FEWER
def test_a_graph_of_a_stranger_keeps_the_function_or_is_refused(tmp_path, graph, data):
    net = timm.create_model("test_vit", num_classes=3)
    path = tmp_path / "graph.json"
    document = graph.to_json()
    part = data.draw(st.sampled_from(["groups", "layouts", "tied", "parameters"]))
    write(path, document | {part: altered(data, json.loads(json.dumps(document[part])), 1)})
    found = attempt(lambda: load_graph(path, net))
    assert found is None or rt.verify(net, found, controls=0, seed=7).invariant


def _use_graph(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Read a graph and permute with it: it is refused, or keeps the weights where nothing is moved."""
    found = attempt(lambda: PermutationGraph.load(path))
    if found is None:
        return
    attempt(lambda: found.apply(found.random(0), weights))
    kept = attempt(lambda: found.apply(found.identity(), weights))
    assert kept is None or all(torch.equal(kept[name], tensor) for name, tensor in weights.items())


# ---- finished ports


@pytest.fixture(scope="module")
def ported(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ported")
    torch.manual_seed(0)
    old = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    like = load_checkpoint(old)
    sides = []
    for number, name in enumerate(("old", "tuned", "new")):
        torch.manual_seed(number)
        shaken = {key: value + 0.01 * torch.randn_like(value) if value.is_floating_point() and "running" not in key else value for key, value in old.state_dict().items()}  # fmt: skip
        sides.append(save_model(folder / name, shaken, like))
    short = {"steps": 1, "batch_size": 8, "grad_batches": 1, "bn_batches": 1, "control": "none", "method": "fgmt"}
    short |= {"verify": False}
    data = {"data.limit": 60, "data.image_size": 28, "data.validation": 0.2}
    options = {**data, **{f"port.{name}": value for name, value in short.items()}}
    result: PortResult = rt.port(*sides, "fashion-mnist", overrides=options, out=folder / "ported", quiet=True)
    assert result.permutation is not None
    return folder / "ported"


@given(data=st.data())
@FEW
def test_documents(tmp_path, ported, data):
    path = tmp_path / "port.json"
    write(path, altered(data, json.loads((ported / "port.json").read_text())))
    _read_port(path)


def _read_port(path: Path) -> None:
    """Read a port.json, and do with it what commands do; it is refused, or all of them can."""
    document = attempt(lambda: read_document(path), "port.json")
    if document is None:
        return
    json.dumps(document.to_json(), allow_nan=False)
    attempt(lambda: check_port(path.parent))
    if document.contenders:
        FinishedPort.of("port", "port", document)


# ---- a byte is another one, in any file of ours

FLIPS = 60


def flipped(content: bytes, seed: int) -> Iterator[bytes]:
    """Copies with one changed byte: the first and the last ones, and others by chance."""
    some = random.Random(seed)
    for place in (0, 1, 7, 8, 9, len(content) - 1, *(some.randrange(len(content)) for _ in range(FLIPS))):
        changed = bytearray(content)
        changed[place] ^= some.choice([1, 2, 4, 8, 16, 32, 64, 128, 255])
        yield bytes(changed)


def test_flips_in_a_permutation(tmp_path, graph):
    path = tmp_path / "permutation.safetensors"
    honest = graph.random(0)
    honest.save(path)
    for content in flipped(path.read_bytes(), 1):
        path.write_bytes(content)
        found = attempt(lambda: Permutation.load(path))
        assert found in (None, honest)


def test_flips_in_a_graph(tmp_path, graph, weights):
    path = tmp_path / "graph.json"
    graph.save(path)
    for content in flipped(path.read_bytes(), 2):
        path.write_bytes(content)
        _use_graph(path, weights)


def test_flips_in_a_document(tmp_path, ported):
    content = (ported / "port.json").read_bytes()
    for changed in flipped(content, 3):
        (tmp_path / "port.json").write_bytes(changed)
        _read_port(tmp_path / "port.json")


def test_flips_in_what_a_port_pins(tmp_path, ported):
    folder = shutil.copytree(ported, tmp_path / "ported")
    for name in ("model.safetensors", "config.json", "permutation.safetensors", "graph.json", "recipe.yaml"):
        content = (folder / name).read_bytes()
        for changed in list(flipped(content, 4))[::12]:
            (folder / name).write_bytes(changed)
            assert any(name in problem for problem in check_port(folder).problems), name
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("save", ["record", "tensors"])
def test_flips_in_unfinished_work(tmp_path, save):
    facts = {"step": 3, "top1": 0.5, "seconds": [1.5, 2.0], "name": "fgmt"}
    tensors = {"weights/w": torch.arange(6.0), "permutation/p": torch.tensor([1, 0, 2])}
    path = tmp_path / "state"
    read: Callable[[Path], Any]
    if save == "record":
        save_record(path, facts)
        read = load_record
    else:
        save_tensors(path, tensors, facts)
        read = lambda path: load_tensors(path)[1]  # noqa: E731
    for content in flipped(path.read_bytes(), 5):
        path.write_bytes(content)
        with limited():
            try:
                found = read(path)
            except (OSError, ValueError):
                continue
        # A file that does not say that it is ours is anybody's, and has no facts.
        assert found == facts or "step" not in found


def test_flips_in_cached_gradients(tmp_path):
    honest = {"w": torch.arange(6.0), "b": torch.ones(3)}
    cache = GradientCache(tmp_path, {"key": 1})
    cache.get(1, lambda: honest)
    path = cache.path(1)
    for content in flipped(path.read_bytes(), 6):
        path.write_bytes(content)
        with limited():
            found = cache.get(1, lambda: honest)
        assert found.keys() == honest.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in honest.items())

"""Gates: meaningless inputs are refused or lead the verdict, and the result records all findings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hf_retarget as rt
from hf_retarget.cli import main
from hf_retarget.document import RelationFacts
from hf_retarget.evaluation.gates import GATES, Evidence, list_errors, list_warnings, look_at_gates
from hf_retarget.evaluation.scorer import Score
from hf_retarget.models import load_checkpoint, save_model

QUICK = {"port.steps": 2, "port.grad_batches": 1, "port.batch_size": 16, "port.bn_batches": 1, "port.control": "naive"}


def make_images(count: int = 240, classes: int = 4, shift: int = 0) -> list[tuple[torch.Tensor, int]]:
    """Images whose class is their brightest corner."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        label = number % classes
        image = 0.3 * torch.rand(1, 8, 8, generator=draw)
        image[:, 4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] += 0.5
        found.append((image, (label + shift) % classes))
    return found


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 4))


def train(net: nn.Module, images: list[tuple[torch.Tensor, int]], steps: int = 60) -> nn.Module:
    net = copy.deepcopy(net)
    inputs, labels = torch.stack([image for image, _ in images]), torch.tensor([label for _, label in images])
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    return net


@pytest.fixture(scope="module")
def nets() -> tuple[nn.Module, nn.Module, nn.Module]:
    """An old base, its fine-tuning, and another base."""
    old = make_net(0)
    return old, train(old, make_images()), make_net(1)


def port(*models: nn.Module, images: Any = None, **changes: Any) -> rt.PortResult:
    return rt.port(*models, images or make_images(), overrides={**QUICK, **changes})


def find(result: rt.PortResult, name: str) -> str | None:
    return next(each.found for each in result.document.gates if each.name == name)


def test_a_sensible_port_passes_all_gates(nets):
    result = port(*nets)
    assert [each.name for each in result.document.gates] == [gate.name for gate in GATES]
    assert {each.name: each.found for each in result.document.gates if each.found and each.name != "simpler"} == {}
    assert "Check first" not in result.document.verdict


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((0, 0, 2), "tuned model is the old base.*--src-ft"),
        ((0, 0, 0), "tuned model is the old base.*--src-ft"),
        ((0, 1, 0), "new base is the old base.*--new-base"),
        ((0, 1, 1), "new base is the tuned model.*--new-base"),
    ],
)
def test_the_same_model_twice_is_refused(nets, order, words, tmp_path):
    with pytest.raises(rt.PortError, match=words):
        rt.port(*(nets[each] for each in order), make_images(), overrides=QUICK, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_swapped_bases_lead_the_verdict(nets):
    old, tuned, _ = nets
    near = train(old, make_images(), 5)
    result = port(make_net(1), tuned, near)
    assert "closer to the new base" in find(result, "swapped")
    assert result.document.verdict.startswith("Check first: the tuned model is closer to the new base")
    assert "swap --src-base and --new-base" in result.document.verdict


def test_labels_in_another_order_are_refused(nets):
    with pytest.raises(rt.PortError, match=r"0\.0% of the images right, and guessing 25\.0%; bring the labels"):
        port(*nets, images=make_images(shift=1))


def test_a_guessing_tuned_model_leads_the_verdict(nets):
    old, tuned, new = nets
    stubborn = copy.deepcopy(tuned)
    with torch.no_grad():
        stubborn[3].bias[1] += 100
    result = port(old, stubborn, new)
    assert find(result, "below chance") == ""
    assert result.document.verdict.startswith("Check first: the tuned model has 25.0% of")
    assert "not significantly more than guessing" in result.document.verdict


def test_a_model_with_only_its_head_tuned_suggests_fitting_one(nets):
    old, _, new = nets
    probe = copy.deepcopy(old)
    probe[3].load_state_dict(train(old, make_images())[3].state_dict())
    result = port(old, probe, new)
    assert "--method head" in find(result, "head only")


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_class_without_images_leads_the_verdict(nets, split):
    images = {"train": make_images(), "test": make_images(80)}
    images[split] = [each for each in images[split] if each[1] != 2]
    result = port(*nets, images=images)
    what = {"train": "training", "test": "test"}[split]
    assert f"there is no {what} image of 2" in find(result, "missing classes")
    assert result.document.verdict.startswith("Check first: there is no")


def test_without_labels_the_tuned_model_must_distinguish_images(nets):
    old, tuned, new = nets
    images = [image for image, _ in make_images()]
    assert find(port(old, tuned, new, images=images), "chance") == ""
    stubborn = copy.deepcopy(tuned)
    with torch.no_grad():
        stubborn[3].bias[1] += 100
    result = port(old, stubborn, new, images=images)
    assert "the same answer" in find(result, "chance")
    assert find(result, "missing classes") is None


def score(right: int, count: int = 200) -> Score:
    said = tuple(int(number >= right) for number in range(count))
    return Score(1.0, right / count, None, count, (None,) * 4, (), said, (0,) * count)


@pytest.mark.parametrize(("ours", "theirs", "found"), [(100, 140, True), (139, 140, False), (150, 140, False)])
def test_a_better_and_simpler_contender_is_named(ours, theirs, found):
    seen = look_at_gates(Evidence(tests={"": score(ours), "naive port": score(theirs)}))
    words = next(each.found for each in seen if each.name == "simpler")
    assert ("naive port has 70.0%" in (words or "")) is found
    assert list_warnings(seen) == [], "the verdict says so itself"


def test_gates_without_evidence_are_left_open():
    seen = look_at_gates(Evidence())
    assert {each.found for each in seen} == {None}
    assert list_errors(seen) == list_warnings(seen) == []
    far = RelationFacts(0.1, 2.0, "independent", {}, 1.4, 0.7, 1.5)
    assert {each.name for each in look_at_gates(Evidence(far)) if each.found == ""} == {
        "untuned",
        "same base",
        "tuned base",
        "head only",
        "swapped",
        "another base",
    }


def test_every_gate_says_what_to_do_and_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "method.md").read_text()
    assert [gate.looks_at for gate in GATES if f"| {gate.looks_at} |" not in page] == []
    assert len({gate.name for gate in GATES}) == len(GATES)
    assert all(gate.advice and gate.looks_at.startswith("whether") for gate in GATES)


def test_check_evaluates_the_gates_it_can(tmp_path, labelled):
    folders = [labelled(tmp_path / name, "test_resnet", num_classes=3) for name in ("old", "tuned")]
    sides = ["--src-base", folders[0], "--src-ft", folders[1], "--new-base", folders[0]]
    result = CliRunner().invoke(main, ["check", *map(str, sides)])
    assert result.exit_code == 1, result.output
    assert "new base is the old base" in result.output


def test_check_finds_classes_without_images(tmp_path, labelled):
    sides = []
    for number, name in enumerate(("old", "tuned", "new")):
        checkpoint = load_checkpoint(labelled(tmp_path / f"first {name}", "test_resnet", num_classes=3))
        torch.manual_seed(number)
        moved = {
            key: each + torch.rand_like(each) if each.ndim > 1 else each for key, each in checkpoint.weights.items()
        }
        sides.append(save_model(tmp_path / name, moved, checkpoint))
    images = {"train": make_images(60, 3), "test": [each for each in make_images(30, 3) if each[1] != 1]}
    found = rt.check(*sides, images)
    assert "there is no test image of 1" in next(each.found for each in found.gates if each.name == "missing classes")
    assert next(each.found for each in found.gates if each.name == "swapped") == ""
    assert found.problems == ()


def test_a_model_of_another_base_leads_the_verdict():
    unlike = RelationFacts(0.999, 0.01, "same lineage", {}, 0.02, 1.4, 1.4, 0.02)
    found = look_at_gates(Evidence(unlike))
    assert list_errors(found) == []
    assert "does not resemble the old base (cosine 0.020)" in list_warnings(found)[0]


def test_nearly_equal_distances_are_distinguished():
    close = RelationFacts(0.999, 1.0, "drifted", {}, 0.06, 0.0602, 0.0601, 1.0)
    assert "(6.01% of the old base's norm away, not 6.02%)" in list_warnings(look_at_gates(Evidence(close)))[0]

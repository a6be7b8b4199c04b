"""The loop: it learns, is reproducible, survives a kill, and has no side effects."""

from __future__ import annotations

import copy
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from hf_retarget.errors import DataError, PortError, RecipeError
from hf_retarget.recipe.options import TrainOptions
from hf_retarget.run import Run
from hf_retarget.training import TrajectoryRecorder, train_model


def same(left: nn.Module, right: nn.Module) -> bool:
    theirs = right.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in left.state_dict().items())


def accuracy(model: nn.Module, split) -> float:
    images, labels = next(split.batches(500, seed=99))
    return float((copy.deepcopy(model).eval()(images).argmax(1) == labels).float().mean())


@pytest.mark.parametrize("options", [{"lr": 0.3}, {"optimizer": "adamw", "lr": 0.02, "clip": 1.0, "warmup": 5}])
def test_training_lowers_the_loss(net, split, options):
    model = net()
    history = train_model(model, split, TrainOptions(steps=60, batch_size=32, **options))
    assert len(history.losses) == 60
    assert history.seconds > 0
    assert accuracy(net(), split) < 0.6 < 0.9 < accuracy(model, split)


def test_each_step_equals_torch_sgd(split):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    reference = copy.deepcopy(model)
    options = TrainOptions(steps=4, batch_size=8, lr=0.1, weight_decay=0.01, warmup=2, label_smoothing=0.1, clip=0.5)
    history = train_model(model, split, options)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for (images, labels), rate in zip(split.batches(8, seed=0, count=4), (0.05, 0.1, 0.1, 0.05), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        loss = cross_entropy(reference(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    assert history.losses == pytest.approx(losses)
    torch.testing.assert_close(model[1].weight, reference[1].weight)


def test_only_the_seed_determines_the_result(net, split):
    first, second, other = net(), net(), net()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    train_model(first, split, TrainOptions(steps=3, batch_size=8))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    train_model(second, split, TrainOptions(steps=3, batch_size=8), Run(device="cpu"))
    train_model(other, split, TrainOptions(steps=3, batch_size=8, seed=1))
    assert same(first, second)
    assert not same(first, other)


def test_dropout_differs_from_step_to_step(split):
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3), nn.Dropout(0.5))
    masks = []
    model[2].register_forward_hook(lambda _module, _inputs, output: masks.append(output == 0))
    train_model(model, split, TrainOptions(steps=2, batch_size=8))
    assert not torch.equal(*masks)


def test_batches_are_drawn_according_to_the_options(net, split):
    train_model(net(), split, TrainOptions(epochs=0.5, batch_size=16, seed=4, augment=True))
    train_model(net(), split, TrainOptions(steps=1), Run(workers=2))
    assert split.asked == [
        {"batch_size": 16, "seed": 4, "augment": True, "skip": 0, "workers": 0},
        {"batch_size": 128, "seed": 0, "augment": False, "skip": 0, "workers": 2},
    ]


def test_frozen_parts_and_modes_are_kept(net, split):
    model, before = net(), net()
    model[0].eval()
    history = train_model(model, split, TrainOptions(steps=3, batch_size=8, freeze=("0",)))
    assert len(history.losses) == 3
    assert same(model[0], before[0])  # the statistics of its BatchNorm, too
    assert not torch.equal(model[4].weight, before[4].weight)
    assert [module.training for module in model] == [False, True, True, True, True]
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_scores_are_recorded_and_no_steps_do_nothing(net, split):
    seen = []

    def score(model: nn.Module, step: int) -> float:
        model.eval()  # a careless score: the loop continues in training mode
        seen.append(step)
        return step / 10

    model, plain = net(), net()
    history = train_model(model, split, TrainOptions(steps=5, batch_size=8, evaluate_every=2), score=score)
    assert history.scores == ((0, 0.0), (2, 0.2), (4, 0.4), (5, 0.5))
    train_model(plain, split, TrainOptions(steps=5, batch_size=8))
    assert same(model, plain)
    assert train_model(model, split, TrainOptions(steps=1, batch_size=8), score=score).scores == ((1, 0.1),)
    assert train_model(model, split, TrainOptions(), score=score).losses == ()
    assert seen == [0, 2, 4, 5, 1]


class Stop(Exception):
    """Raised during a run."""


@pytest.mark.parametrize("options", [{"lr": 0.1}, {"momentum": 0.0}, {"optimizer": "adamw", "freeze": ("0.0",)}])
@pytest.mark.parametrize("stop", [3, 4, 6])
def test_an_interrupted_run_resumes_to_the_same_weights(net, split, tmp_path, options, stop):
    settings = TrainOptions(steps=6, batch_size=8, evaluate_every=1, checkpoint_every=2, **options)

    def score(model: nn.Module, step: int) -> float:
        if step == stop and not stopped:
            stopped.append(step)
            raise Stop
        return float(model[4].weight.detach().sum())

    stopped = [0]
    whole = net()
    expected = train_model(
        whole, split, settings, score=score, recorder=TrajectoryRecorder(tmp_path / "whole", every=4)
    )
    stopped.clear()
    recorder = TrajectoryRecorder(tmp_path / "parts", every=4)
    with pytest.raises(Stop):
        train_model(net(), split, settings, score=score, checkpoint=tmp_path / "state", recorder=recorder)
    model = net()
    again = TrajectoryRecorder(tmp_path / "parts", every=4)
    history = train_model(model, split, settings, score=score, checkpoint=tmp_path / "state", recorder=again)
    assert split.asked[-1]["skip"] == {3: 2, 4: 2, 6: 4}[stop]
    assert same(model, whole)
    assert (history.losses, history.scores) == (expected.losses, expected.scores)
    files = [sorted((tmp_path / name).iterdir()) for name in ("whole", "parts")]
    assert [path.name for path in files[0]][:3] == [f"step-00000{step}.safetensors" for step in (0, 4, 6)]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_a_finished_run_is_only_read(net, split, tmp_path):
    settings = TrainOptions(steps=3, batch_size=8)
    first, second = net(), net()
    expected = train_model(first, split, settings, checkpoint=tmp_path / "state")
    found = train_model(second, split, settings, checkpoint=tmp_path / "state")
    assert same(first, second)
    assert found.losses == expected.losses


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import Split, make_net
from hf_retarget.training import train_model
from hf_retarget.recipe.options import TrainOptions

def score(model, step):
    if step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0

options = TrainOptions(steps=6, batch_size=8, evaluate_every=1, checkpoint_every=1, optimizer="adamw")
train_model(make_net(), Split(), options, checkpoint=Path(sys.argv[2]), score=score)
"""


def test_a_killed_process_resumes_to_the_same_weights(net, split, tmp_path):
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path / "state")]
    assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
    settings = TrainOptions(steps=6, batch_size=8, evaluate_every=1, checkpoint_every=1, optimizer="adamw")
    whole, resumed = net(), net()
    train_model(whole, split, settings, score=lambda *_: 0.0)
    train_model(resumed, split, settings, checkpoint=tmp_path / "state", score=lambda *_: 0.0)
    assert split.asked[-1]["skip"] == 3
    assert same(whole, resumed)


def test_a_checkpoint_of_another_run_is_refused(net, split, small_split, tmp_path):
    settings = TrainOptions(steps=2, batch_size=8, freeze=("4",))
    train_model(net(), split, settings, checkpoint=tmp_path / "state")
    with pytest.raises(PortError, match=r"another fine-tuning \(lr was 0\.01 and is 0\.5 now\); delete it"):
        train_model(
            net(), split, TrainOptions(steps=2, batch_size=8, lr=0.5, freeze=("4",)), checkpoint=tmp_path / "state"
        )
    with pytest.raises(PortError, match="images was 96 and is 50 now"):
        train_model(net(), small_split(50), settings, checkpoint=tmp_path / "state")
    other = net()
    nn.init.zeros_(other[4].bias)
    with pytest.raises(PortError, match="start was '"):
        train_model(other, split, settings, checkpoint=tmp_path / "state")
    (tmp_path / "state").write_bytes(b"broken")
    again = train_model(net(), split, settings, checkpoint=tmp_path / "state")  # a damaged one is ignored
    assert again.losses == train_model(net(), split, settings).losses


def test_bad_input_is_refused(net, split, small_split, tmp_path):
    with pytest.raises(RecipeError, match=r"no parameter under '0\.2x'; there are 0\.2"):
        train_model(net(), split, TrainOptions(steps=1, freeze=("0.2x",)))
    with pytest.raises(RecipeError, match="no parameter is left to train"):
        train_model(net(), split, TrainOptions(steps=1, freeze=("0", "4")))
    with pytest.raises(DataError, match="no images to train on"):
        train_model(net(), small_split(0), TrainOptions(epochs=1))
    with pytest.raises(PortError, match=r"the loss is (inf|nan) at step \d of 9; lower lr \(now 1e\+30\)"):
        train_model(net(), split, TrainOptions(steps=9, batch_size=8, lr=1e30))
    (tmp_path / "file").write_text("")
    with pytest.raises(PortError, match="cannot write the checkpoint"):
        train_model(net(), split, TrainOptions(steps=1, batch_size=8), checkpoint=tmp_path / "file" / "state")


def test_a_split_that_ends_early_is_reported(net, split):
    class Short(type(split)):
        def batches(self, *args, **options):
            return super().batches(*args, **options | {"count": 2})

    with pytest.raises(DataError, match="gave 2 minibatches of the 5"):
        train_model(net(), Short(), TrainOptions(steps=5, batch_size=8))


def test_tied_and_shared_weights_are_stored(split, tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.second.weight = self.first.weight
            self.register_buffer("step", torch.zeros(()), persistent=False)

        def forward(self, images):
            self.step += 1  # not in the state dict, but part of the state
            return self.second(self.first(images.mean((1, 2))))[:, :3] * (1 + self.step)

    def run(steps_until_error: float, checkpoint: Path | None) -> Tied:
        def score(_model, step: int) -> float:
            if step >= steps_until_error:
                raise Stop
            return 0.0

        torch.manual_seed(0)
        model = Tied()
        settings = TrainOptions(steps=4, batch_size=8, evaluate_every=1, checkpoint_every=1)
        train_model(model, split, settings, checkpoint=checkpoint, score=score)
        return model

    with pytest.raises(Stop):
        run(3, tmp_path / "state")
    assert same(run(math.inf, tmp_path / "state"), run(math.inf, None))


TWO_PROCESSES = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import Split, make_net
from hf_retarget.run import Run, leave
from hf_retarget.evaluation.scorer import score_model
from hf_retarget.training import train_model
from hf_retarget.recipe.options import TrainOptions
from hf_retarget.training import TrajectoryRecorder

run = Run(device="cpu")
accelerator = run.accelerator
assert accelerator.num_processes == 2
options, folder = TrainOptions(steps=3, batch_size=8, evaluate_every=1, checkpoint_every=1), Path(sys.argv[2])

def scorer(accelerator):
    data = list(Split().batches(8, seed=9, count=3))
    return lambda model, step: score_model(model, data, 3, accelerator=accelerator).loss

both, alone = make_net(), make_net()
recorder = TrajectoryRecorder(folder / "trajectory", every=2)
kept = dict(checkpoint=folder / "state", recorder=recorder)
shared = train_model(both, Split(), options, run, score=scorer(accelerator), **kept)
single = train_model(alone, Split(), options, score=scorer(None))
assert (shared.losses, shared.scores) == (single.losses, single.scores)
assert all(torch.equal(value, alone.state_dict()[name]) for name, value in both.state_dict().items())
wrapped = accelerator.prepare_model(make_net())
assert type(wrapped).__name__ == "DistributedDataParallel"
TrajectoryRecorder(folder / "wrapped").start(wrapped)
accelerator.wait_for_everyone()
(folder / f"done-{accelerator.process_index}").touch()
leave(0)  # torch's threads may abort a process that exits normally
"""


def test_two_processes_train_like_one(tmp_path, net):
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    here = str(Path(__file__).parent)
    done = subprocess.run([*command, here, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}
    assert [path.name for path in TrajectoryRecorder.load(tmp_path / "trajectory")] == [
        "step-000002.safetensors",
        "step-000003.safetensors",
    ]
    start = load_file(tmp_path / "wrapped" / "step-000000.safetensors")
    assert start.keys() == net().state_dict().keys()

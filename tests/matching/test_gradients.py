"""Gradients: what they average, what they leave alone, and that processes do not matter."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from hf_retarget.errors import MatchError
from hf_retarget.files import hash_tensors
from hf_retarget.matching.gradients import GradientCache, Gradients, matching_mode


def batches(count: int, size: int = 6, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, 8, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator))
        for _ in range(count)
    ]


def net(norm: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5) if norm else nn.Identity(), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4))


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


def test_gradient_is_the_mean_over_minibatches_in_train_mode_without_dropout():
    model = net()
    data = batches(3)
    found = Gradients(model, nn.functional.cross_entropy)(weights_of(model), data)
    reference = copy.deepcopy(model).train()
    reference[3].eval()
    loss = sum(nn.functional.cross_entropy(reference(x), y) for x, y in data) / 3
    for (name, _), grad in zip(
        reference.named_parameters(), torch.autograd.grad(loss, list(reference.parameters())), strict=True
    ):
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = net().train(training)
    model[3].eval()
    before = copy.deepcopy(model.state_dict())
    Gradients(model, nn.functional.cross_entropy)(weights_of(model), batches(2))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [training] * 3 + [False] + [training] * 3
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_error_inside_leaves_the_statistics_in_place():
    model = net()
    with pytest.raises(RuntimeError), matching_mode(model):
        raise RuntimeError
    assert model[1].running_mean is not None
    assert model.training


def test_micro_batches_change_nothing_without_batch_norm():
    model = net(norm=False)
    whole = Gradients(model, nn.functional.cross_entropy)(weights_of(model), batches(2))
    parts = Gradients(model, nn.functional.cross_entropy, micro_batch=4)(weights_of(model), batches(2))
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-6)


def test_any_loss_and_any_weights():
    model = net(norm=False)
    doubled = {name: 2 * value for name, value in weights_of(model).items()}
    found = Gradients(model, lambda output, _: output.square().mean())(doubled, batches(1))
    assert found["6.weight"].abs().sum() > 0
    frozen = Gradients(model, lambda output, _: output.sum() * 0)(doubled, batches(1))
    assert not frozen["6.weight"].any()


def test_bad_input_is_refused():
    model = net()
    gradients = Gradients(model, nn.functional.cross_entropy)
    with pytest.raises(MatchError, match="is the loader empty"):
        gradients(weights_of(model), [])
    with pytest.raises(MatchError, match=r"the weights lack '0\.weight'"):
        gradients({}, batches(1))


def test_cache_keeps_gradients_by_everything_they_depend_on(tmp_path):
    cache, other = GradientCache(tmp_path, {"seed": 0}), GradientCache(tmp_path, {"seed": 1})
    asked = []

    def compute(value: float):
        asked.append(value)
        return {"w": torch.full((2,), value)}

    assert cache.get(1, lambda: compute(1.0))["w"].tolist() == [1, 1]
    assert cache.get(1, lambda: compute(2.0))["w"].tolist() == [1, 1]
    assert other.get(1, lambda: compute(3.0))["w"].tolist() == [3, 3]
    assert cache.get(2, lambda: compute(4.0))["w"].tolist() == [4, 4]
    cache.path(1).write_bytes(b"broken")
    assert cache.get(1, lambda: compute(5.0))["w"].tolist() == [5, 5]
    assert asked == [1.0, 3.0, 4.0, 5.0]


def test_hash_tensors_sees_names_shapes_and_values():
    base = {"a": torch.zeros(2), "b": torch.tensor(1.0)}
    assert hash_tensors(base) == hash_tensors(dict(reversed(base.items())))
    for other in ({"a": torch.zeros(3)}, {"a": torch.ones(2)}, {"a": torch.zeros(2).double()}):
        assert hash_tensors(base | other) != hash_tensors(base)


TWO_PROCESSES = """
import sys, torch
from hf_retarget.run import choose_device
from torch import nn
import hf_retarget as rt
from hf_retarget.matching.gradients import Gradients
from hf_retarget.matching.methods import match

torch.manual_seed(0)
accelerator = choose_device("cpu")
assert accelerator.num_processes == int(sys.argv[1])
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))
data = [(torch.randn(8, 6), torch.randint(0, 4, (8,))) for _ in range(5)]
gradients = Gradients(model, nn.functional.cross_entropy, accelerator=accelerator)
sides = [gradients({n: v.detach() * scale for n, v in model.named_parameters()}, data) for scale in (1.0, 1.5)]
found = match(rt.trace(model, torch.zeros(1, 6)), *sides)
if accelerator.is_main_process:
    found.permutation.save(sys.argv[2])
"""


def test_two_processes_find_the_same_permutation_as_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    for count in ("1", "2"):
        command = [*run, count, str(script), count, str(tmp_path / f"{count}.safetensors")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = ((tmp_path / f"{count}.safetensors").read_bytes() for count in "12")
    assert one == two


def test_a_model_that_remembers_its_weights_is_asked_anew():
    class Biased(nn.Module):
        """Keeps what it computed from its weights while in evaluation mode, as LeViT does."""

        def __init__(self):
            super().__init__()
            self.table, self.head, self.cache = nn.Parameter(torch.ones(4)), nn.Linear(4, 3), {}

        def forward(self, x):
            if "bias" not in self.cache:
                self.cache["bias"] = self.table * 2
            return self.head(x + self.cache["bias"])

    torch.manual_seed(0)
    model = Biased()
    gradients = Gradients(model, nn.functional.cross_entropy)
    batches = [(torch.randn(5, 4), torch.arange(5) % 3) for _ in range(2)]
    weights = {name: value.detach() for name, value in model.named_parameters()}
    first = gradients(weights, batches)
    other = gradients(weights | {"table": torch.zeros(4)}, batches)
    assert not model.cache
    assert first["table"].any()
    assert not torch.equal(first["head.weight"], other["head.weight"])

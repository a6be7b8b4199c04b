"""Tracing: the caller's model is not changed, and failures are explained."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hf_retarget as rt
from hf_retarget.models import empty_model, random_model

IMAGE = torch.zeros(2, 3, 8, 8)


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(216, 2)
    )


class Cached(nn.Module):
    """Caches values computed from its weights in evaluation mode, like levit, tiny_vit and efficientformer_v2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, 8), nn.Linear(8, 2)
        self.bias = nn.Parameter(torch.randn(8))
        self.attention_bias_cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or self.training:
            bias = self.bias.tanh()
        else:
            bias = self.attention_bias_cache.setdefault(str(x.device), self.bias.tanh())
        return self.out(self.first(x) * bias)


# ---------------------------------------------------------------------- the caller's model is not changed


def use(model: nn.Module, example: Tensor) -> None:
    graph = rt.trace(model, example)
    rt.verify(model, graph, example)


def test_weights_buffers_gradients_and_modes_are_not_changed():
    model = convolutional()
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    model[0].weight.requires_grad_(False)
    model[1].eval()
    model.train(True)
    model[2].eval()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: (tensor, tensor.detach().clone(), tensor.requires_grad) for name, tensor in tensors.items()}
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    modes = [module.training for module in model.modules()]
    use(model, IMAGE)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert after.keys() == before.keys()
    for name, (tensor, value, requires_grad) in before.items():
        assert after[name] is tensor
        assert torch.equal(tensor, value)
        assert tensor.requires_grad is requires_grad
    assert all(
        torch.equal(parameter.grad, gradients[name])
        for name, parameter in model.named_parameters()
        if name in gradients
    )
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_of_the_weights_is_kept(dtype):
    model = convolutional().to(dtype)
    use(model, IMAGE.to(dtype))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_a_model_in_half_precision_has_the_same_graph():
    whole, half = convolutional(), convolutional().half()
    assert rt.trace(half, IMAGE.half()) == rt.trace(whole, IMAGE)


def test_hooks_are_kept_and_still_run():
    model, seen = convolutional(), []
    handle = model[0].register_forward_hook(lambda module, inputs, output: seen.append(module))
    hooks = dict(model[0]._forward_hooks)
    use(model, IMAGE)
    assert dict(model[0]._forward_hooks) == hooks
    seen.clear()
    model(IMAGE)
    assert seen == [model[0]]
    handle.remove()


def test_caches_are_kept_and_do_not_interfere():
    model, x = Cached().eval(), torch.rand(2, 4)
    fresh = rt.trace(Cached(), x)
    with torch.no_grad():
        model(x)
    (cached,) = model.attention_bias_cache.values()
    graph = rt.trace(model, x)
    result = rt.verify(model, graph, x, controls=None)
    assert graph == fresh, "values cached from the weights are not constants"
    assert result.passed, result.verdict
    assert list(model.attention_bias_cache.values()) == [cached]
    assert next(iter(model.attention_bias_cache.values())) is cached


def test_the_caches_of_levit_are_kept():
    model = random_model("levit_128s").eval()
    with torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))
    caches = [module.attention_bias_cache for module in model.modules() if hasattr(module, "attention_bias_cache")]
    before = [dict(cache) for cache in caches]
    assert any(before)
    graph = rt.trace(model)
    assert all(now[key] is then[key] for now, then in zip(caches, before, strict=True) for key in then)
    assert graph == rt.trace(empty_model("levit_128s"))


def test_random_state_and_defaults_are_not_changed():
    model, state = convolutional(), torch.get_rng_state()
    use(model, IMAGE)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()


def test_the_example_is_not_modified():
    example = torch.rand(2, 3, 8, 8, requires_grad=True)
    value = example.detach().clone()
    use(convolutional(), example)
    assert torch.equal(example, value)
    assert example.grad is None


# ---------------------------------------------------------------------- models of all sorts


def test_a_model_on_the_meta_device_has_the_same_graph():
    with torch.device("meta"):
        empty = convolutional()
    graph = rt.trace(empty, IMAGE)
    assert graph == rt.trace(convolutional(), IMAGE)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    assert rt.verify(empty, graph, IMAGE, controls=None).passed


def test_an_example_on_the_meta_device():
    assert rt.trace(convolutional(), IMAGE.to("meta")) == rt.trace(convolutional(), IMAGE)


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_graph_does_not_depend_on_the_callers_context(context):
    expected = rt.trace(convolutional(), IMAGE)
    model = convolutional()
    with context():
        graph = rt.trace(model, IMAGE)
        assert rt.verify(model, graph, IMAGE).passed
    assert graph == expected


def test_attention_is_not_traced_as_a_fused_operator():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 2)).eval().requires_grad_(False)
    with torch.no_grad():
        graph = rt.trace(model, torch.zeros(2, 5, 3))
    assert not graph.unknown_operators
    assert len(graph) == 5


def test_memory_order_of_the_weights_does_not_matter():
    model = convolutional().to(memory_format=torch.channels_last)
    assert rt.trace(model, IMAGE) == rt.trace(convolutional(), IMAGE)
    assert rt.verify(model, rt.trace(model, IMAGE), IMAGE).passed


def test_a_copy_of_a_model_can_be_traced_again():
    model = random_model("test_vit")
    assert rt.trace(copy.deepcopy(model)) == rt.trace(model) == rt.trace(model)


class Asks(nn.Module):
    """Evaluates a condition on a tensor before it computes."""

    def __init__(self, question) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, 8), nn.Linear(8, 2)
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.question(x):
            hidden = hidden.cumsum(-1)
        return self.out(hidden)


@pytest.mark.parametrize(
    ("question", "groups"),
    [
        (lambda x: (torch.arange(x.shape[1]) > 7).any(), 1),
        (lambda x: (torch.arange(x.shape[1]) < 7).all(), 0),
        (lambda x: torch.ones(x.shape[0]).sum() > 1, 0),
    ],
)
def test_a_condition_on_shapes_is_traced(question, groups):
    model, x = Asks(question), torch.rand(2, 4)
    graph = rt.trace(model, x)
    assert len(graph) == groups
    assert rt.verify(model, graph, x).passed


def test_a_condition_on_shapes_is_traced_on_the_meta_device():
    with torch.device("meta"):
        model = Asks(lambda x: (torch.arange(x.shape[1], device="cpu") > 7).any())
    assert len(rt.trace(model, torch.rand(2, 4))) == 1


@pytest.mark.parametrize("question", [lambda x: x.mean() > 0.2, lambda x: (x > 0.2).any()])
def test_a_condition_on_data_is_refused(question):
    # The example takes one branch, other inputs the other: a graph of one branch is wrong for the other.
    with pytest.raises(rt.TraceError, match="Asks"):
        rt.trace(Asks(question), torch.zeros(2, 4))


# ---------------------------------------------------------------------- what cannot be traced


class Fails(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("the tide is out"), KeyError("tide"), RuntimeError("")])
def test_a_model_that_fails_is_explained(error):
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), Fails(error)))
    with pytest.raises(rt.TraceError) as caught:
        rt.trace(model, torch.zeros(2, 4))
    message = str(caught.value)
    assert "Sequential" in message
    assert "'1.1' (Fails)" in message
    assert "float32[2, 4]" in message
    assert type(error).__name__ in message
    assert caught.value.__cause__ is not None


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.abs().sum()) + 1):
            x = self.layer(x)
        return x


class Filters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x[x > 0]


@pytest.mark.parametrize(("kind", "message"), [(Loops, r"Loops.*float32\[2, 4\]"), (Filters, "depends on the data")])
def test_a_model_whose_shapes_depend_on_data_is_explained(kind, message):
    with pytest.raises(rt.TraceError, match=message):
        rt.trace(kind(), torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("example", "described"),
    [
        (torch.zeros(2, 5), r"float32\[2, 5\]"),
        ((torch.zeros(2, 4), torch.zeros(3)), r"float32\[2, 4\], float32\[3\]"),
        ({"image": torch.zeros(2, 4)}, r"float32\[2, 4\]"),
    ],
    ids=["shape", "number", "name"],
)
def test_an_example_that_does_not_fit_is_described(example, described):
    with pytest.raises(rt.TraceError, match=described):
        rt.trace(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), example)


def test_an_example_is_needed_if_timm_does_not_know_one():
    with pytest.raises(rt.TraceError, match=r"no example input for Sequential.*example_input="):
        rt.trace(convolutional())
    with pytest.raises(rt.TraceError, match=r"no example input for Sequential.*example_input="):
        rt.verify(convolutional(), rt.trace(convolutional(), IMAGE))

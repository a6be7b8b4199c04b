"""Plain modules, one idea each: their expected groups, and the verification of these."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import hf_retarget as rt
from hf_retarget.models import empty_model, random_model

IMAGE = torch.zeros(2, 3, 8, 8)
TOKENS = torch.zeros(2, 5, 3)  # batch, length, features
ROW = torch.zeros(2, 4)


class Function(nn.Module):
    """A module with a given forward: `Function(lambda self, x: self.fc(x), fc=nn.Linear(4, 2))`."""

    def __init__(self, function: Callable[..., object], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs: Tensor, **keywords: Tensor) -> object:
        return self.function(self, *inputs, **keywords)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def reasons(graph: rt.PermutationGraph, tensor: str, dim: int) -> set[str]:
    return {pinned.reason for pinned in graph.pinned if pinned.axis == rt.Axis(tensor, dim)}


# ---------------------------------------------------------------------- stacks of layers


def test_mlp(verify, shapes):
    graph = verify(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 3)), ROW)
    assert shapes(graph) == [(6,), (8,)]
    assert [group.name for group in graph] == ["0", "2"]
    assert set(graph["0"].axes) == {rt.Axis("0.weight", 0), rt.Axis("0.bias", 0), rt.Axis("2.weight", 1)}
    assert reasons(graph, "0.weight", 1) == {"input"}
    assert reasons(graph, "4.bias", 0) == {"output"}


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm2d(6), [(6,)]),
        (nn.BatchNorm2d(6, affine=False), [(6,)]),
        (nn.BatchNorm2d(6, track_running_stats=False), [(6,)]),
        (nn.InstanceNorm2d(6, affine=True), [(6,)]),
        (nn.GroupNorm(3, 6), [(3,), (3, 2)]),
        (nn.GroupNorm(1, 6), [(6,)]),
        (nn.LayerNorm((6, 8, 8)), [(6,)]),
        (nn.LocalResponseNorm(3), []),  # looks at neighbouring channels
        (nn.PReLU(6), [(6,)]),
        (nn.PReLU(), [(6,)]),
        (nn.Dropout2d(0.5), [(6,)]),
        (nn.ReLU(inplace=True), [(6,)]),
        (nn.Softmax2d(), [(6,)]),
        (nn.Hardswish(), [(6,)]),
        (nn.MaxPool2d(2), [(6,)]),
        (nn.Upsample(scale_factor=2), [(6,)]),
        (nn.ZeroPad2d(1), [(6,)]),
        (nn.ReflectionPad2d(1), [(6,)]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_one_layer_between_convolutions(verify, shapes, layer, shape):
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), layer, nn.Conv2d(6, 2, 3))
    assert shapes(verify(model, IMAGE)) == shape


def test_convolution_flattened_into_linear(verify, shapes):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 5), nn.Linear(5, 2))
    graph = verify(model, IMAGE)
    assert shapes(graph) == [(5,), (6,)]
    assert rt.Axis("3.weight", 1) in graph["0"].axes
    assert reasons(graph, "3.weight", 1) == {"spatial"}


def test_grouped_depthwise_and_transposed_convolutions(verify, shapes):
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.Conv2d(6, 6, 3, groups=6),  # depthwise
        nn.Conv2d(6, 12, 1, groups=3),  # 3 × 2 to 3 × 4
        nn.ConvTranspose2d(12, 6, 2, groups=3),  # 3 × 4 to 3 × 2
        nn.Conv2d(6, 5, 1),
        nn.ConvTranspose2d(5, 2, 2),
    )
    assert shapes(verify(model, IMAGE)) == [(3,), (3, 2), (3, 2), (3, 4), (5,)]


def test_batch_norm_statistics_are_in_the_group(verify):
    graph = verify(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 3)), IMAGE)
    moving = {"1.weight", "1.bias", "1.running_mean", "1.running_var"}
    assert moving <= {axis.tensor for axis in graph["0"].axes}
    assert "1.num_batches_tracked" in graph.layouts, "integer buffers are kept, and pinned"
    assert graph.parameters == {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}


class BlockA(nn.Module):
    """A residual block of the CIFAR ResNets: the shortcut takes every second pixel and pads channels with zeros."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.stride, self.extra = stride, (after - before) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra, self.extra))
        return F.relu(y + x)


def test_resnet_with_zero_padded_shortcuts(verify, shapes):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        BlockA(4, 4, 1),
        BlockA(4, 8, 2),
        BlockA(8, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    graph = verify(model, IMAGE)
    # The stream: 4, then 2 + 4 + 2 with the same 4 in the middle. In the blocks: 4, 8, 8.
    assert shapes(graph) == [(2,), (2,), (4,), (4,), (8,), (8,)]
    assert {rt.Axis("0.weight", 0), rt.Axis("2.conv2.weight", 0), rt.Axis("6.weight", 1)} <= set(graph["0"].axes)


def test_encoder_decoder_with_skip(verify, shapes):
    def forward(self, x):
        first = self.first(x).relu()
        second = self.second(F.max_pool2d(first, 2)).relu()
        return self.out(self.mix(torch.cat([self.up(second), first], 1)).relu())

    model = Function(
        forward,
        first=nn.Conv2d(3, 4, 3, padding=1),
        second=nn.Conv2d(4, 8, 3, padding=1),
        up=nn.ConvTranspose2d(8, 5, 2, stride=2),
        mix=nn.Conv2d(9, 6, 3, padding=1),
        out=nn.Conv2d(6, 2, 1),
    )
    graph = verify(model, IMAGE)
    assert shapes(graph) == [(4,), (5,), (6,), (8,)]
    assert rt.Axis("mix.weight", 1) in graph["first"].axes
    assert rt.Axis("mix.weight", 1) in graph["up"].axes


def test_dense_connections(verify, shapes):
    def forward(self, x):
        a = self.a(x)
        b = self.b(a.relu())
        joined = self.norm(torch.cat([a, b], 1))
        c = self.c(joined.relu())
        return self.out(torch.cat([joined, c], 1).mean((2, 3)))

    model = Function(
        forward,
        a=nn.Conv2d(3, 4, 3, padding=1),
        b=nn.Conv2d(4, 5, 3, padding=1),
        norm=nn.BatchNorm2d(9),
        c=nn.Conv2d(9, 6, 3, padding=1),
        out=nn.Linear(15, 2),
    )
    assert shapes(verify(model, IMAGE)) == [(4,), (5,), (6,)]


def test_shuffled_channels(verify, shapes):
    def forward(self, x):
        x = self.stem(x)
        left, right = x.chunk(2, 1)
        x = torch.cat([left, self.branch(right).relu()], 1)
        x = x.view(2, 2, 3, 8, 8).transpose(1, 2).flatten(1, 2)  # a channel shuffle: 2 × 3 becomes 3 × 2
        return self.out(x)

    model = Function(forward, stem=nn.Conv2d(3, 6, 1), branch=nn.Conv2d(3, 3, 3, padding=1), out=nn.Conv2d(6, 2, 3))
    # The left half and what the branch writes are interleaved, and both keep their own order; the right half is inside.
    assert shapes(verify(model, IMAGE)) == [(3,), (3,), (3,)]


def test_squeeze_and_excitation(verify, shapes):
    def forward(self, x):
        x = self.stem(x)
        return self.out(x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid())

    model = Function(
        forward, stem=nn.Conv2d(3, 8, 3), down=nn.Conv2d(8, 4, 1), up=nn.Conv2d(4, 8, 1), out=nn.Conv2d(8, 2, 3)
    )
    assert shapes(verify(model, IMAGE)) == [(4,), (8,)]


def test_gated_linear_unit(verify, shapes):
    def forward(self, x):
        value, gate = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)

    assert shapes(verify(Function(forward, up=nn.Linear(4, 12), down=nn.Linear(6, 2)), ROW)) == [(6,)]


def test_pixel_shuffle(verify, shapes):
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.PixelShuffle(2), nn.Conv2d(3, 2, 3))
    assert shapes(verify(model, IMAGE)) == [(3,)]


def test_mixer(verify, shapes):
    def forward(self, x):
        x = self.embed(x)
        x = x + self.down(self.up(x.transpose(1, 2)).relu()).transpose(1, 2)
        return self.head(x.mean(1))

    model = Function(forward, embed=nn.Linear(3, 6), up=nn.Linear(5, 7), down=nn.Linear(7, 5), head=nn.Linear(6, 2))
    assert shapes(verify(model, TOKENS)) == [(6,), (7,)]


def test_stacked_experts(verify, shapes):
    def forward(self, x):
        hidden = torch.einsum("nd,edh->neh", x, self.up).relu()
        gate = self.gate(x).softmax(-1)
        return torch.einsum("neh,ehd,ne->nd", hidden, self.down, gate)

    model = Function(forward, gate=nn.Linear(4, 3), up=parameter(3, 4, 5), down=parameter(3, 5, 2))
    assert shapes(verify(model, ROW)) == [(3,), (3, 5)], "experts, and the hidden units of each"


# ---------------------------------------------------------------------- recurrent


def last_step(self, x):
    return self.head(self.rnn(self.embed(x))[0][:, -1])


def final_state(self, x):
    state = self.rnn(self.embed(x))[1]
    return self.head(state[0][-1] if isinstance(state, tuple) else state[-1])


def both_final_states(self, x):
    state = self.rnn(self.embed(x))[1]
    state = state[0] if isinstance(state, tuple) else state
    return self.head(torch.cat([state[-2], state[-1]], 1))


@pytest.mark.parametrize("forward", [last_step, final_state])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_classifier(verify, shapes, kind, forward):
    model = Function(forward, embed=nn.Linear(3, 6), rnn=kind(6, 4, batch_first=True), head=nn.Linear(4, 2))
    graph = verify(model, TOKENS)
    assert shapes(graph) == [(4,), (6,)]
    if kind is not nn.RNN:
        assert "order" in reasons(graph, "rnn.weight_ih_l0", 0), "the gates are pinned"


@pytest.mark.parametrize("forward", [last_step, both_final_states])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_in_two_layers_and_directions(verify, shapes, kind, forward):
    rnn = kind(6, 4, num_layers=2, bidirectional=True, batch_first=True)
    graph = verify(Function(forward, embed=nn.Linear(3, 6), rnn=rnn, head=nn.Linear(8, 2)), TOKENS)
    assert shapes(graph) == [(4,), (4,), (4,), (4,), (6,)], "one group for each layer and direction"


def test_lstm_with_projection(verify, shapes):
    model = Function(
        last_step, embed=nn.Linear(3, 6), rnn=nn.LSTM(6, 8, proj_size=4, batch_first=True), head=nn.Linear(4, 2)
    )
    assert shapes(verify(model, TOKENS)) == [(4,), (6,), (8,)]


def test_lstm_with_a_learned_initial_state(verify, shapes):
    def forward(self, x):
        start = (self.h.expand(1, 2, 4).contiguous(), self.c)
        return self.head(self.rnn(x, start)[0][:, -1])

    model = Function(
        forward, rnn=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 2), h=parameter(1, 1, 4), c=parameter(1, 2, 4)
    )
    graph = verify(model, TOKENS)
    assert shapes(graph) == [(4,)]
    assert reasons(graph, "c", 1) == {"input"}, "a state for each item of the batch"


# ---------------------------------------------------------------------- weights that are computed or shared


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, torch.nn.utils.weight_norm], ids=["new", "old"])
@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm(verify, shapes, norm, dim):
    model = nn.Sequential(norm(nn.Linear(4, 8), dim=dim), nn.ReLU(), norm(nn.Linear(8, 2), dim=dim))
    graph = verify(model, ROW)
    assert shapes(graph) == [(8,)]
    assert graph.groups[0].name == "0"


def test_spectral_norm(verify, shapes):
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    assert shapes(verify(model, ROW)) == [(8,)]


def test_standardised_weights(verify, shapes):
    def forward(self, x):
        flat = self.conv.weight.flatten(1)
        weight = (flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True)
        return self.head(F.conv2d(x, weight.view_as(self.conv.weight) * self.gain).relu())

    model = Function(forward, conv=nn.Conv2d(3, 6, 3), head=nn.Conv2d(6, 2, 3), gain=parameter(6, 1, 1, 1))
    assert shapes(verify(model, IMAGE)) == [(6,)]


def test_embedding_tied_with_output(verify, shapes):
    model = Function(
        lambda self, x: self.out(self.mix(self.embed(x)).relu()),
        embed=nn.Embedding(10, 6),
        mix=nn.Linear(6, 6),
        out=nn.Linear(6, 10, bias=False),
    )
    model.out.weight = model.embed.weight
    tokens = torch.tensor([[1, 2, 9], [0, 3, 3]])
    graph = verify(model, tokens)
    assert shapes(graph) == [(6,)], "the embedding and what it is compared with have one order"
    assert graph.tied == {"out.weight": "embed.weight"}
    moved = graph.apply(graph.random(0), model.state_dict())
    assert torch.equal(moved["out.weight"], moved["embed.weight"])
    assert not torch.equal(moved["out.weight"], model.out.weight)


def test_one_layer_used_twice(verify, shapes):
    model = Function(
        lambda self, x: self.last(self.twice(self.twice(self.first(x)).relu()).relu()),
        first=nn.Linear(4, 6),
        twice=nn.Linear(6, 6),
        last=nn.Linear(6, 2),
    )
    assert shapes(verify(model, ROW)) == [(6,)]


def test_one_module_under_two_names(verify, shapes):
    shared = nn.Linear(6, 6)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), shared, nn.ReLU(), shared, nn.Linear(6, 2))
    graph = verify(model, ROW)
    assert shapes(graph) == [(6,)]
    assert graph.tied == {"4.weight": "2.weight", "4.bias": "2.bias"}


# ---------------------------------------------------------------------- attention

WIDTH, HEADS, INNER = 12, 3, 4
STREAM, PLAIN_HEADS, PER_HEAD = (WIDTH,), (HEADS,), (HEADS, INNER)


class Attention(nn.Module):
    """A residual attention block between two linear layers. `spell` makes q, k, v [batch, heads, length, inner]."""

    def __init__(
        self, spell: Callable[..., tuple[Tensor, Tensor, Tensor]], fused: bool = True, **modules: nn.Module
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.spell = spell
        for name, module in modules.items():
            setattr(self, name, module)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = self.spell(self, x)
        x = x + self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return self.head(x.mean(1))


class SpelledOut(Attention):
    """Attention as two products and a softmax."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q * INNER**-0.5) @ k.transpose(-2, -1)).softmax(-1) @ v


def heads(x: Tensor) -> Tensor:
    return x.view(2, 5, HEADS, INNER).transpose(1, 2)


def view_permute_unbind(self, x):
    return self.qkv(x).view(2, 5, 3, HEADS, INNER).permute(2, 0, 3, 1, 4).unbind(0)


def view_permute_select(self, x):
    qkv = self.qkv(x).reshape(2, 5, 3, HEADS, INNER).permute(2, 0, 3, 1, 4)
    return qkv[0], qkv[1], qkv[2]


def select_before_permute(self, x):
    qkv = self.qkv(x).view(2, 5, 3, HEADS, INNER)
    return tuple(qkv[:, :, i].transpose(1, 2) for i in range(3))


def chunk_then_view(self, x):
    return tuple(heads(part) for part in self.qkv(x).chunk(3, -1))


def split_then_view(self, x):
    return tuple(heads(part) for part in self.qkv(x).split([WIDTH, WIDTH, WIDTH], dim=2))


def slice_then_view(self, x):
    qkv = self.qkv(x)
    return heads(qkv[..., :WIDTH]), heads(qkv[..., WIDTH : 2 * WIDTH]), heads(qkv[..., 2 * WIDTH :])


def heads_then_chunk(self, x):
    return self.qkv(x).view(2, 5, HEADS, 3 * INNER).transpose(1, 2).chunk(3, -1)


def heads_then_unbind(self, x):
    return tuple(part.transpose(1, 2) for part in self.qkv(x).view(2, 5, HEADS, 3, INNER).unbind(3))


def inner_then_unbind(self, x):
    return tuple(part.transpose(1, 2) for part in self.qkv(x).view(2, 5, HEADS, INNER, 3).unbind(-1))


def fused_keys_and_values(self, x):
    k, v = self.kv(x).view(2, 5, 2, HEADS, INNER).permute(2, 0, 3, 1, 4)
    return heads(self.q(x)), k, v


def slices_of_the_weight(self, x):
    pieces = zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)
    return tuple(heads(F.linear(x, weight, bias)) for weight, bias in pieces)


def einsum_of_the_weight(self, x):
    weight = self.qkv.weight.view(3, HEADS, INNER, WIDTH)
    return torch.einsum("bnc,thdc->tbhnd", x, weight).unbind(0)


SPELLINGS = [
    view_permute_unbind,
    view_permute_select,
    select_before_permute,
    chunk_then_view,
    split_then_view,
    slice_then_view,
    heads_then_chunk,
    heads_then_unbind,
    inner_then_unbind,
    fused_keys_and_values,
    slices_of_the_weight,
    einsum_of_the_weight,
]


@pytest.mark.parametrize("kind", [Attention, SpelledOut])
@pytest.mark.parametrize("spell", SPELLINGS)
def test_fused_projections(verify, shapes, spell, kind):
    graph = verify(kind(spell, fused=spell is not fused_keys_and_values), TOKENS)
    assert shapes(graph) == [PLAIN_HEADS, PER_HEAD, PER_HEAD, STREAM]
    inner = [group for group in graph if group.blocks]
    assert all(graph[name].shape == PLAIN_HEADS for group in inner for name in group.outer)
    assert sum(rt.Axis("proj.weight", 1) in group.axes for group in inner) == 1, "the values', not the queries'"


def test_query_and_key_norm_shared_by_heads(verify, shapes):
    def spell(self, x):
        q, k, v = view_permute_unbind(self, x)
        return self.q_norm(q), self.k_norm(k), v

    graph = verify(Attention(spell, q_norm=nn.LayerNorm(INNER), k_norm=nn.LayerNorm(INNER)), TOKENS)
    assert shapes(graph) == [PLAIN_HEADS, PER_HEAD, (INNER,), STREAM]
    (shared,) = [group for group in graph if group.shape == (INNER,)]
    assert rt.Axis("q_norm.weight", 0) in shared.axes
    assert rt.Axis("k_norm.weight", 0) in shared.axes


def test_a_norm_without_weights_keeps_heads_independent(verify, shapes):
    def spell(self, x):
        q, k, v = view_permute_unbind(self, x)
        return F.normalize(q, dim=-1), F.layer_norm(k, (INNER,)), v

    assert shapes(verify(Attention(spell), TOKENS)) == [PLAIN_HEADS, PER_HEAD, PER_HEAD, STREAM]


def test_talking_heads(verify, shapes):
    class Talking(Attention):
        def attend(self, q, k, v):
            scores = (q @ k.transpose(-2, -1)).permute(0, 2, 3, 1)
            scores = self.after(self.before(scores).softmax(2)).permute(0, 3, 1, 2)
            return scores @ v

    model = Talking(view_permute_unbind, before=nn.Linear(HEADS, HEADS), after=nn.Linear(HEADS, HEADS))
    # Heads of queries and keys, heads in between, heads of values.
    assert shapes(verify(model, TOKENS)) == [PLAIN_HEADS, PLAIN_HEADS, PLAIN_HEADS, PER_HEAD, PER_HEAD, STREAM]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def test_rotary_positions(verify, shapes):
    def spell(self, x):
        q, k, v = view_permute_unbind(self, x)
        angles = torch.arange(5)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
        return rotate(q, angles), rotate(k, angles), v

    graph = verify(Attention(spell), TOKENS)
    assert shapes(graph) == [PLAIN_HEADS, PER_HEAD, STREAM]
    assert "constant" in reasons(graph, "qkv.weight", 0)


def test_grouped_queries(verify, shapes):
    class Grouped(Attention):
        def attend(self, q, k, v):
            return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))

    class Enabled(Attention):
        def attend(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def spell(self, x):
        k, v = self.kv(x).view(2, 5, 2, 2, 3).permute(2, 0, 3, 1, 4)  # 2 heads of 3
        return self.q(x).view(2, 5, 4, 3).transpose(1, 2), k, v  # 4 heads of 3

    for kind in (Grouped, Enabled):
        model = kind(spell, q=nn.Linear(WIDTH, 12), kv=nn.Linear(WIDTH, 12))
        del model.qkv
        # Heads of keys; the two queries of each; inner axes of queries and keys, and of values, for each head of keys.
        assert shapes(verify(model, TOKENS)) == [(2,), (2, 2), (2, 3), (2, 3), STREAM]


def test_relative_position_bias(verify, shapes):
    class Biased(Attention):
        def attend(self, q, k, v):
            bias = self.table[self.index].permute(2, 0, 1)
            return F.scaled_dot_product_attention(q, k, v, bias)

    model = Biased(view_permute_unbind, table=parameter(9, HEADS))
    distance = torch.arange(5)[:, None] - torch.arange(5)[None] + 4
    model.register_buffer("index", distance)
    graph = verify(model, TOKENS)
    assert shapes(graph) == [PLAIN_HEADS, PER_HEAD, PER_HEAD, STREAM]
    assert reasons(graph, "table", 0) == {"order"}
    assert reasons(graph, "index", 0) == {"constant"}
    (blocks,) = [group for group in graph if group.shape == PLAIN_HEADS]
    assert rt.Axis("table", 1) in blocks.axes


def test_class_token_and_positions(verify, shapes):
    def forward(self, x):
        x = torch.cat([self.token.expand(2, -1, -1), self.embed(x)], 1) + self.positions
        return self.head(self.mlp(x)[:, 0])

    model = Function(
        forward,
        embed=nn.Linear(3, 8),
        token=parameter(1, 1, 8),
        positions=parameter(1, 6, 8),
        mlp=nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 8)),
        head=nn.Linear(8, 2),
    )
    # `mlp` writes what only the head reads: the stream ends before it.
    assert shapes(verify(model, TOKENS)) == [(7,), (8,), (8,)]


def test_multihead_attention(verify, shapes):
    def forward(self, x):
        x = self.embed(x)
        return self.head((x + self.attention(x, x, x)[0]).mean(1))

    for keywords in ({"batch_first": True}, {"batch_first": False}, {"batch_first": True, "bias": False}):
        model = Function(
            forward, embed=nn.Linear(3, 8), attention=nn.MultiheadAttention(8, 2, **keywords), head=nn.Linear(8, 2)
        )
        assert shapes(verify(model, TOKENS)) == [(2,), (2, 4), (2, 4), (8,)]


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_layer(verify, shapes, norm_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    model = nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 2))
    assert shapes(verify(model, TOKENS)) == [(2,), (2, 4), (2, 4), (8,), (16,)]


def test_transformer_with_decoder(verify, shapes):
    model = Function(
        lambda self, x: self.head(self.transformer(self.embed(x), self.embed(x))),
        embed=nn.Linear(3, 8),
        transformer=nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        head=nn.Linear(8, 2),
    )
    # Three attentions of (2), (2, 4), (2, 4); two hidden layers; one stream for both sides, as both read one embedding.
    assert shapes(verify(model, TOKENS)) == [(2,)] * 3 + [(2, 4)] * 6 + [(8,), (16,), (16,)]


# ---------------------------------------------------------------------- constants, buffers, leftovers


@pytest.mark.parametrize(
    ("values", "expected"),
    [(torch.zeros(8), [(8,)]), (torch.full((8,), 3.0), [(8,)]), (torch.arange(8.0), []), (torch.zeros(2, 1), [(8,)])],
    ids=["zeros", "threes", "counting", "broadcast"],
)
def test_a_constant_pins_only_what_it_distinguishes(verify, shapes, values, expected):
    model = Function(
        lambda self, x: self.out(self.first(x) + self.constant), first=nn.Linear(4, 8), out=nn.Linear(8, 2)
    )
    model.register_buffer("constant", values, persistent=False)
    graph = verify(model, ROW)
    assert shapes(graph) == expected
    assert reasons(graph, "first.weight", 0) == (set() if expected else {"constant"})


def test_a_constant_that_distinguishes_halves_pins_the_axis(verify, shapes):
    model = Function(lambda self, x: self.out(self.first(x) * self.mask), first=nn.Linear(4, 8), out=nn.Linear(8, 2))
    model.register_buffer("mask", torch.tensor([0.0] * 4 + [1.0] * 4), persistent=False)
    assert shapes(verify(model, ROW)) == []


def test_a_constant_computed_in_forward(verify, shapes):
    def forward(self, x):
        ones = torch.ones(8).cumsum(0).clamp(max=1)  # the same everywhere, as only its value tells
        return self.out(self.first(x) * ones)

    assert shapes(verify(Function(forward, first=nn.Linear(4, 8), out=nn.Linear(8, 2)), ROW)) == [(8,)]


def test_a_persistent_float_buffer_moves_with_its_group(verify, shapes):
    model = Function(lambda self, x: self.out(self.first(x) * self.scale), first=nn.Linear(4, 8), out=nn.Linear(8, 2))
    model.register_buffer("scale", torch.arange(8.0))
    graph = verify(model, ROW)
    assert shapes(graph) == [(8,)]
    assert {rt.Axis("scale", 0), rt.Axis("first.weight", 0), rt.Axis("out.weight", 1)} <= set(graph.groups[0].axes)
    assert "scale" not in graph.parameters


def test_an_integer_buffer_is_a_constant(verify, shapes):
    model = Function(lambda self, x: self.out(self.first(x)[:, self.order]), first=nn.Linear(4, 8), out=nn.Linear(8, 2))
    model.register_buffer("order", torch.randperm(8))
    graph = verify(model, ROW)
    assert shapes(graph) == []
    assert reasons(graph, "order", 0) == {"constant"}
    moved = graph.apply(graph.random(0), model.state_dict())
    assert torch.equal(moved["order"], model.order)


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.fft(x).abs()


def inverse(x: Tensor) -> Tensor:
    return torch.linalg.inv((x[:, None] * x[..., None]).exp())[:, 0]


@pytest.mark.parametrize("operator", [spectrum, inverse])
def test_an_operator_without_a_rule_pins_its_axes_and_is_named(verify, shapes, operator):
    model = Function(
        lambda self, x: self.out(self.hidden(operator(self.first(x))).relu()),
        first=nn.Linear(4, 8),
        hidden=nn.Linear(8, 6),
        out=nn.Linear(6, 2),
    )
    graph = verify(model, ROW, unknown=True)
    assert shapes(graph) == [(6,)]
    assert reasons(graph, "first.weight", 0) == {"unknown operator"}
    (unknown,) = graph.unknown_operators
    assert unknown.operator.startswith(("aten.fft_fft", "aten.linalg_inv"))
    assert unknown.operator in str(unknown)


def test_the_module_of_an_operator_without_a_rule_is_named():
    inner = Function(lambda self, x: torch.fft.fft(x).abs())
    graph = rt.trace(nn.Sequential(nn.Linear(4, 8), nn.Sequential(inner), nn.Linear(8, 2)), ROW)
    assert [unknown.module for unknown in graph.unknown_operators] == ["1.0"]


def test_unused_parameters(verify, shapes):
    model = Function(lambda self, x: self.used(x), used=nn.Linear(4, 2), spare=nn.Linear(3, 5))
    graph = verify(model, ROW)
    assert shapes(graph) == []
    assert reasons(graph, "spare.weight", 0) == reasons(graph, "spare.weight", 1) == {"unused"}
    moved = graph.apply(graph.random(0), model.state_dict())
    assert torch.equal(moved["spare.weight"], model.spare.weight)


def test_a_partly_used_parameter(verify, shapes):
    model = Function(
        lambda self, x: self.out(F.linear(x, self.weight[2:8])), weight=parameter(10, 4), out=nn.Linear(6, 2)
    )
    graph = verify(model, ROW)
    assert (6,) in shapes(graph)
    assert rt.Axis("out.weight", 1) in next(group for group in graph if group.shape == (6,)).axes


def test_a_model_without_parameters(verify, shapes):
    assert shapes(verify(nn.Sequential(nn.ReLU()), ROW)) == []


def test_scalars_and_parameter_lists(verify, shapes):
    def forward(self, x):
        return self.out(sum(layer(x) * scale for layer, scale in zip(self.layers, self.scales, strict=True)))

    model = Function(
        forward,
        layers=nn.ModuleList(nn.Linear(4, 6) for _ in range(3)),
        scales=nn.ParameterList(nn.Parameter(torch.tensor(0.5)) for _ in range(3)),
        out=nn.Linear(6, 2),
    )
    assert shapes(verify(model, ROW)) == [(6,)]


# ---------------------------------------------------------------------- inputs, outputs, contexts


def test_dictionaries_and_tuples_as_outputs(verify, shapes):
    def forward(self, x):
        hidden = self.first(x)
        return {"logits": self.out(hidden.relu()), "features": (self.side(hidden), [hidden.sum(-1)])}

    model = Function(forward, first=nn.Linear(4, 8), side=nn.Linear(8, 5), out=nn.Linear(8, 2))
    graph = verify(model, ROW)
    assert shapes(graph) == [(8,)]
    assert reasons(graph, "side.weight", 0) == {"output"}


def test_an_intermediate_output_is_pinned(verify, shapes):
    def forward(self, x):
        hidden = self.first(x)
        return self.out(self.second(hidden).relu()), hidden

    graph = verify(Function(forward, first=nn.Linear(4, 8), second=nn.Linear(8, 6), out=nn.Linear(6, 2)), ROW)
    assert shapes(graph) == [(6,)]
    assert reasons(graph, "first.weight", 0) == {"output"}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(4, 8), nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, other: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
        hidden = self.left(x) if other is None else self.left(x) + self.right(other)
        return self.out(hidden.relu() if scale is None else hidden.relu() * scale)


@pytest.mark.parametrize(
    "example",
    [
        (torch.zeros(2, 4), torch.zeros(2, 3)),
        {"x": torch.zeros(2, 4), "other": torch.zeros(2, 3), "scale": torch.zeros(2, 1)},
    ],
    ids=["tuple", "mapping"],
)
def test_several_inputs(verify, shapes, example):
    graph = verify(TwoInputs(), example)
    assert shapes(graph) == [(8,)]
    assert rt.Axis("right.weight", 0) in graph["left"].axes


def test_an_input_pins_the_axes_it_meets(verify, shapes):
    example = {"x": torch.zeros(2, 4), "scale": torch.zeros(2, 8)}
    graph = verify(TwoInputs(), example)
    assert shapes(graph) == []
    assert reasons(graph, "left.weight", 0) == {"input"}
    assert reasons(graph, "right.weight", 0) == {"unused"}


def test_a_block_without_gradients(verify, shapes):
    def forward(self, x):
        hidden = self.first(x)
        with torch.no_grad():
            scale = hidden.abs().amax(-1, keepdim=True)
            share = hidden.softmax(-1)
        return self.out(hidden / scale + share)

    assert shapes(verify(Function(forward, first=nn.Linear(4, 8), out=nn.Linear(8, 2)), ROW)) == [(8,)]


def test_a_block_without_gradients_that_has_parameters(verify, shapes):
    def forward(self, x):
        with torch.no_grad():
            hidden = self.first(x).relu()
        return self.out(self.second(hidden).relu())

    model = Function(forward, first=nn.Linear(4, 8), second=nn.Linear(8, 6), out=nn.Linear(6, 2))
    assert shapes(verify(model, ROW)) == [(6,), (8,)]


def test_a_block_without_autocast(verify, shapes):
    def forward(self, x):
        hidden = self.first(x)
        with torch.autocast("cpu", enabled=False):
            hidden = hidden.float().softmax(-1)
        return self.out(hidden)

    assert shapes(verify(Function(forward, first=nn.Linear(4, 8), out=nn.Linear(8, 2)), ROW)) == [(8,)]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("test_resnet", {}, 11),
        ("test_resnet", {"num_classes": 0}, 10),  # the last stage is the output
        ("test_resnet", {"in_chans": 1}, 11),
        ("test_vit", {}, 25),
        ("test_vit", {"num_classes": 0}, 24),  # the residual stream is the output
        ("test_vit", {"in_chans": 1, "img_size": 64}, 25),
        ("test_vit", {"num_classes": 0, "global_pool": ""}, 24),
        ("test_convnext", {"in_chans": 1, "num_classes": 2}, 13),
    ],
)
def test_timm_models_with_other_heads(verify, name, options, expected):
    assert len(verify(random_model(name, **options), draws=1, controls=2)) == expected
    assert len(rt.trace(empty_model(name, **options))) == expected

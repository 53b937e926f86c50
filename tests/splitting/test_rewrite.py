"""Split over tensor ranks, modules of every common shape compute what they compute in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Law = Callable[..., dict[str, Any]]
# B batch, T tokens, D width, H heads, K head width
BATCH, TOKENS, WIDTH = 3, 5, 24


def hidden() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def seeded(make: Callable[[], nn.Module], x: Callable[[], Tensor] = hidden) -> Callable[[], tuple[nn.Module, Tensor]]:
    def build() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return make(), x()

    return build


class Gated(nn.Module):
    """A gated MLP whose gate and inner half are one projection, cut by `chunk`, by slices or by `narrow`."""

    def __init__(self, *, cut: str) -> None:
        super().__init__()
        self.cut = cut
        self.norm = nn.LayerNorm(WIDTH)
        self.both = nn.Linear(WIDTH, 66, bias=cut == "chunk")
        self.down = nn.Linear(33, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        both = self.both(self.norm(x))
        if self.cut == "chunk":
            gate, up = both.chunk(2, dim=-1)
        elif self.cut == "slice":
            gate, up = both[..., :33], both[..., 33:]
        else:
            gate, up = both.narrow(-1, 0, 33), both.narrow(-1, 33, 33)
        return x + self.down(F.silu(gate) * up)


class Grouped(nn.Module):
    """Attention whose heads of keys serve groups of queries, with norms on heads, as PyTorch's own or repeated."""

    def __init__(self, heads: int, few: int, *, native: bool) -> None:
        super().__init__()
        self.heads, self.few, self.native = heads, few, native
        self.query = nn.Linear(WIDTH, heads * 4)
        self.key, self.value = nn.Linear(WIDTH, few * 4, bias=False), nn.Linear(WIDTH, few * 4)
        self.query_norm, self.key_norm = nn.RMSNorm(4), nn.LayerNorm(4)
        self.out = nn.Linear(heads * 4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def apart(flat: Tensor) -> Tensor:
            return flat.unflatten(-1, (-1, 4)).transpose(1, 2)

        q, k, v = self.query_norm(apart(self.query(x))), self.key_norm(apart(self.key(x))), apart(self.value(x))
        if not self.native:
            k, v = (each.repeat_interleave(self.heads // self.few, dim=1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.native)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Attention from one projection, with a bias by distance, written out."""

    def __init__(self, *, sizes: tuple[int, int, int] | None) -> None:
        super().__init__()
        self.sizes = sizes  # heads of queries, keys and values; None for three of a kind, woven by a permutation
        total = sum(sizes) if sizes else 12
        self.all = nn.Linear(WIDTH, total * 6)
        self.out = nn.Linear(24, WIDTH)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]))

    def forward(self, x: Tensor) -> Tensor:
        flat, tokens = self.all(x), x.shape[1]
        if self.sizes is None:
            q, k, v = flat.reshape(-1, tokens, 3, 4, 6).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            parts = flat.split([size * 6 for size in self.sizes], dim=-1)
            q, k, v = (part.view(part.shape[0], tokens, -1, 6).transpose(1, 2) for part in parts)
            k, v = (each[:, :, None].expand(-1, -1, 4 // each.shape[1], -1, -1).flatten(1, 2) for each in (k, v))
        distance = torch.arange(tokens)[None, :] - torch.arange(tokens)[:, None]
        scores = q @ k.transpose(-1, -2) / 6**0.5 + self.slopes[:, None, None] * distance
        scores = scores.masked_fill(distance > 0, -torch.inf)
        mixed = torch.softmax(scores, dim=-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(x.shape[0], tokens, -1))


class Bottleneck(nn.Module):
    """Convolutions with norms between, the middle one over each channel alone or over all."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.enter = nn.Conv2d(6, 12, 1, bias=False)
        self.first = nn.BatchNorm2d(12)
        self.middle = nn.Conv2d(12, 12, 3, padding=1, groups=12 if alone else 1)
        self.second = nn.GroupNorm(4, 12) if alone else nn.BatchNorm2d(12)
        self.leave = nn.Conv2d(12, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.first(self.enter(x))), 2)
        h = F.relu(self.second(self.middle(h)), inplace=True)
        h = self.leave(h)
        h += F.avg_pool2d(x, 2)
        return h.mean((2, 3))


class Words(nn.Module):
    """Tokens to logits, the table being the head's, too."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, WIDTH, padding_idx=3), nn.Embedding(9, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=True)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = F.rms_norm(x + self.outer(torch.tanh(self.inner(x))), (WIDTH,))
        return self.head(x) * 0.5


class Experts(nn.Module):
    """Every expert on every token, weighed by a router; the experts' weights are batched."""

    def __init__(self, *, written: str) -> None:
        super().__init__()
        self.written = written
        self.router = nn.Linear(WIDTH, 3)
        self.up = nn.Parameter(torch.randn(3, WIDTH, 10) / 5)
        self.bias = nn.Parameter(torch.randn(3, 1, 10))
        self.down = nn.Parameter(torch.randn(3, 10, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chance = torch.softmax(self.router(flat), dim=-1)
        if self.written == "einsum":
            h = F.gelu(torch.einsum("td,edf->etf", flat, self.up) + self.bias)
            y = torch.einsum("etf,efd->etd", h, self.down)
        else:
            h = F.gelu(torch.baddbmm(self.bias, flat.expand(3, -1, -1), self.up))
            y = torch.bmm(h, self.down)
        return (y * chance.t().unsqueeze(-1)).sum(0).view_as(x)


class Shared(nn.Module):
    """One pair of layers, used twice, and one matrix, used there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.matrix = nn.Parameter(torch.randn(18, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(F.leaky_relu(self.up(x)))
        return F.linear(torch.sin(F.linear(x, self.matrix)), self.matrix.t())


class Detour(nn.Module):
    """A column to which another pair's sum is added, so that each rank takes its part of that sum."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)
        self.narrow, self.wide = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, 32, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x) + self.wide(self.narrow(x))))


class Stubborn(nn.Module):
    """What stays whole: heads that do not divide, a column that others read, a recurrence, a norm between two."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.seen, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.before, self.norm, self.behind = nn.Linear(WIDTH, 12), nn.LayerNorm(12), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        seen = self.seen(x)
        x = self.after(F.relu(seen)) + seen.square().mean(-1, keepdim=True)
        x, _ = self.recurrent(x)
        return self.behind(self.norm(self.before(x)))


def images() -> Tensor:
    return torch.randn(4, 6, 8, 8, generator=torch.Generator().manual_seed(0))


def tokens() -> Tensor:
    return torch.randint(11, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))


def chain(count: int) -> nn.Module:
    return nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


MODULES = {
    "mlp": seeded(lambda: nn.Sequential(nn.Linear(WIDTH, 33), nn.GELU(), nn.Linear(33, WIDTH, bias=False))),
    "chain": seeded(lambda: chain(5)),
    "bare chain": seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))),
    "gated": seeded(lambda: Gated(cut="chunk")),
    "gated, sliced": seeded(lambda: Gated(cut="slice")),
    "gated, narrowed": seeded(lambda: Gated(cut="narrow")),
    "grouped": seeded(lambda: Grouped(12, 6, native=False)),
    "grouped, native": seeded(lambda: Grouped(12, 6, native=True)),
    "one head of keys": seeded(lambda: Grouped(12, 1, native=True)),
    "one head of keys, repeated": seeded(lambda: Grouped(12, 1, native=False)),
    "fused": seeded(lambda: Fused(sizes=None)),
    "fused, few": seeded(lambda: Fused(sizes=(4, 2, 2))),
    "convolution": seeded(lambda: Bottleneck(alone=False), images),
    "convolution, alone": seeded(lambda: Bottleneck(alone=True), images),
    "words": seeded(lambda: Words(11), tokens),
    "experts": seeded(lambda: Experts(written="bmm")),
    "experts, einsum": seeded(lambda: Experts(written="einsum")),
    "shared": seeded(Shared),
    "detour": seeded(lambda: Detour(bias=False)),
    "detour, biased": seeded(lambda: Detour(bias=True)),
    "stubborn": seeded(Stubborn),
}


def test_split_over_two_every_gradient_is_that_of_one_process(law: Law) -> None:
    found = law(MODULES, ranks=2)

    for outcome in found.values():
        outcome.assert_same()
    assert {name: outcome.whole for name, outcome in found.items()} == {
        # Only norms, routers, tables of positions and what is added after the sum are whole where all else divides.
        "mlp": set(),
        "chain": {"2.bias", "6.bias"},
        "bare chain": {"1.bias", "3.bias"},  # A column right behind a sum.
        "gated": {"norm.weight", "norm.bias", "down.bias"},
        "gated, sliced": {"norm.weight", "norm.bias", "down.bias"},
        "gated, narrowed": {"norm.weight", "norm.bias", "down.bias"},
        "grouped": {"query_norm.weight", "key_norm.weight", "key_norm.bias", "out.bias"},
        "grouped, native": {"query_norm.weight", "key_norm.weight", "key_norm.bias", "out.bias"},
        "one head of keys": {"query_norm.weight", "key_norm.weight", "key_norm.bias", "out.bias"}
        | {"key.weight", "value.weight", "value.bias"},
        "one head of keys, repeated": {"query_norm.weight", "key_norm.weight", "key_norm.bias", "out.bias"}
        | {"key.weight", "value.weight", "value.bias"},
        "fused": {"out.bias"},
        "fused, few": {"out.bias"},
        "convolution": {"middle.bias", "second.weight", "second.bias"},
        "convolution, alone": {"leave.bias"},
        "words": {"places.weight", "outer.bias"},
        "experts": {"router.weight", "router.bias"},
        "experts, einsum": {"router.weight", "router.bias"},
        "shared": {"down.bias"},
        "detour": set(),
        "detour, biased": {"wide.bias"},
        "stubborn": {
            *("attention.in_proj_weight", "attention.in_proj_bias", "seen.bias", "after.weight", "after.bias"),
            *(f"recurrent.{kind}_{gate}_l0" for kind in ("weight", "bias") for gate in ("ih", "hh")),
            *(f"{layer}.{kind}" for layer in ("before", "norm", "behind") for kind in ("weight", "bias")),
        },
    }


def test_split_over_three_what_does_not_divide_evenly_is_split(law: Law) -> None:
    found = law({name: MODULES[name] for name in ("mlp", "gated", "grouped", "words", "convolution, alone")}, ranks=3)

    for outcome in found.values():
        outcome.assert_same()
    # 11 tokens leave 4, 4 and 3.
    assert found["mlp"].whole == set()
    assert found["words"].whole == {"places.weight", "outer.bias"}
    # Twelve channels divide, the four groups of their norm do not.
    assert {"enter.weight", "middle.weight", "second.weight"} < found["convolution, alone"].whole


def test_split_over_four_heads_that_do_not_divide_stay_whole(law: Law) -> None:
    names = ("gated, sliced", "grouped, native", "fused", "fused, few")
    found = law({name: MODULES[name] for name in names}, ranks=4)

    for outcome in found.values():
        outcome.assert_same()
    # Six heads of keys do not divide by four, twelve of queries do.
    assert {"key.weight", "value.weight"} < found["grouped, native"].whole
    assert not {"query.weight", "out.weight"} & found["grouped, native"].whole
    # Nor do two of a fused projection, which then is whole; what follows it still ends in split outputs.
    assert found["fused, few"].whole == {"all.weight", "all.bias"}
    assert found["fused"].whole == {"out.bias"}

"""What does one sublayer ask of a card? FLOPs, bytes and launches of its forward, for arrays of strategies."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from supernode.workload.shape import ModelShape, Numbers
from supernode.workload.strategy import Software, Strategies

# Router, dispatch, combine, shared experts, norm and residual; of these, norm, router and what prepares the dispatch.
MIXTURE_KERNELS = 60.0
ROUTER_KERNELS = 30.0
# Flash kernels work on blocks of so many keys; a window that ends inside a block takes the whole block.
SCORE_BLOCK = 128.0


def _zero() -> Numbers:
    return np.zeros(())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """What a forward takes on one card; the backward takes twice the products and their traffic.

    Attributes:
        products: FLOPs of the linear layers' matrix products.
        operands: elements that those read and write, each matrix once.
        inputs: elements of activations and weights that are cast where products are of 8 bits or fewer.
        scores: FLOPs of the attention's core.
        traffic: bytes of everything that memory binds.
        kernels: launches.
        recorded: of these, in recorded graphs.
        exponentials: of the attention's core, one for each pair of query and key that see each other.
        syncs: times that the card waits for the host.
        redone: computed again in the backward, whatever the strategy says.
        last: part of the products that is the layer's last one.
        renewed: bytes of what memory binds and the backward computes again.
        score_traffic: bytes of unfused attention scores, part of what selective recomputation repeats.
    """

    products: Numbers
    operands: Numbers
    inputs: Numbers
    scores: Numbers
    traffic: Numbers
    kernels: Numbers | float
    score_traffic: Numbers
    exponentials: Numbers = field(default_factory=_zero)
    renewed: Numbers = field(default_factory=_zero)
    recorded: Numbers | float = 0.0
    syncs: float = 0.0
    redone: bool = False
    last: Numbers = field(default_factory=_zero)


def _product(rows: Numbers, columns: Numbers, depth: Numbers, count: Numbers | float = 1.0) -> tuple[Numbers, ...]:
    """Return FLOPs, operand elements and input elements of `count` products of (rows × depth) and (depth × columns).

    Weights are kept in the products' precision from step to step; only the other input is cast.
    """
    inputs = rows * depth
    return count * 2 * rows * columns * depth, count * (inputs + depth * columns + rows * columns), count * inputs


def _sum(*products: tuple[Numbers, ...]) -> tuple[Numbers, ...]:
    return tuple(sum(parts[1:], parts[0]) for parts in zip(*products, strict=True))


def _residual_traffic(model: ModelShape, ways: Strategies, software: Software) -> Numbers:
    """Return bytes of a norm and a residual sum around a sublayer; with sequence parallelism each card has a part."""
    elements = model.streams * ways.tokens * model.width / np.where(ways.sequence_parallel > 0, ways.tensor, 1)
    # Fused: read and write for the norm, two reads and a write for bias, dropout and sum together. Unfused: each alone.
    passes = 5.0 if software.fused else 8.0
    return elements * (passes * ways.element + (1 if software.dropout else 0))


def _norm_traffic(model: ModelShape, ways: Strategies) -> Numbers:
    """Return bytes of a norm: read and written."""
    spread = np.where(ways.sequence_parallel > 0, ways.tensor, 1)
    return 2 * model.streams * ways.tokens * model.width / spread * ways.element


def attention_demand(model: ModelShape, ways: Strategies, software: Software) -> Demand:
    """Return what one attention with its norm and residual takes."""
    tokens, tensor = ways.tokens, ways.tensor
    queries, outputs = model.heads * model.head_width / tensor, model.heads * model.values / tensor
    pairs = model.key_value_heads * (model.head_width + model.values) / tensor
    plain = _product(tokens, queries + pairs, model.width)
    rank, shared = model.query_rank, model.key_value_rank
    keys = model.heads * (np.maximum(model.head_width - 64, 0) + model.values) / tensor
    latent = _sum(
        _product(tokens, rank + shared, model.width), _product(tokens, queries, rank),
        _product(tokens, keys, np.maximum(shared - 64, 0)),
    )  # fmt: skip
    is_latent = model.key_value_rank > 0
    into = tuple(np.where(is_latent, a, b) for a, b in zip(latent, plain, strict=True))
    products, operands, inputs = _sum(into, _product(tokens, model.width, outputs))
    scores, exponentials, score_traffic = _core(model, ways, software)
    moved = tokens * (2 * queries + 2 * np.where(is_latent, 2 * queries, pairs)) * ways.element
    traffic = moved * (1.0 if software.fused else 2.0) + _residual_traffic(model, ways, software)
    return Demand(
        products=products, operands=operands, inputs=inputs, scores=scores, traffic=traffic,
        kernels=24.0 if software.flash else 30.0, score_traffic=score_traffic, exponentials=exponentials,
        recorded=24.0 if software.records_attention else 0.0,
        renewed=_norm_traffic(model, ways) * software.redone_norms,
    )  # fmt: skip


def _core(model: ModelShape, ways: Strategies, software: Software) -> tuple[Numbers, Numbers, Numbers]:
    """Return FLOPs of the two products over the scores, exponentials (of fused ones), and bytes of written scores."""
    heads = model.heads / ways.tensor
    widths = model.head_width + model.values
    sequence = ways.sequence
    if not software.flash:
        # Eleven bytes a score: written, read and written by the softmax, dropped (a byte of mask), read again.
        per_score = 11.0 if software.dropout else 8.0
        pairs = ways.tokens * sequence * heads
        return 2 * pairs * widths, np.zeros(()), per_score * pairs
    seen = np.where(model.causal > 0, sequence / 2, sequence)
    near = np.where(model.window > 0, np.minimum(model.window + SCORE_BLOCK, seen), seen)
    share = model.windowed / np.maximum(model.attentions, 1)
    pairs = ways.tokens * (share * near + (1 - share) * seen) * heads
    return 2 * pairs * widths, pairs, np.zeros(())


def mlp_demand(model: ModelShape, ways: Strategies, software: Software) -> Demand:
    """Return what one dense feed-forward sublayer with its norm and residual takes."""
    tokens, hidden = ways.tokens, model.mlp_width / ways.tensor
    products, operands, inputs = _sum(
        _product(tokens, (1 + model.gated) * hidden, model.width), _product(tokens, model.width, hidden)
    )
    passes = (2 + model.gated) if software.fused else (4 + 2 * model.gated)
    traffic = tokens * hidden * passes * ways.element + _residual_traffic(model, ways, software)
    none = np.zeros(())
    return Demand(
        products=products, operands=operands, inputs=inputs, scores=none, traffic=traffic, kernels=16.0,
        score_traffic=none, last=1 / (2 + model.gated), recorded=16.0 if software.records_mlp else 0.0,
    )  # fmt: skip


def mixture_demand(model: ModelShape, ways: Strategies, software: Software) -> Demand:
    """Return what one mixture of experts takes, tokens spread evenly over the experts."""
    tokens, routed_width = ways.tokens, model.routed_width
    # Without expert tensor parallelism, the tensor axis' tokens are spread over its cards before they are routed.
    visits = tokens * model.routed * ways.expert_tensor / ways.tensor
    local = np.maximum(model.experts / ways.expert, 1)
    hidden = model.expert_width / ways.expert_tensor
    rows = visits / local
    experts = _sum(
        _product(rows, (1 + model.gated) * hidden, routed_width, local), _product(rows, routed_width, hidden, local)
    )
    shared = model.shared_width / ways.tensor
    own = tokens / ways.tensor
    latent = np.where(model.latent > 0, model.latent, 0)
    around = _sum(
        _product(tokens, (1 + model.gated) * shared, model.width), _product(tokens, model.width, shared),
        _product(own, latent, model.width), _product(own, model.width, latent),
    )  # fmt: skip
    products, operands, inputs = _sum(experts, around)
    # A fused dispatcher writes each visit where it arrives and reads it where it leaves; its sender reads a token once
    # for all experts. A plain one reads and writes each where it is sent and where it comes back to be weighed, and
    # permutes it before and after.
    passes = 2 if software.fused_dispatch else 8
    permuted = visits / ways.expert_tensor * routed_width * passes * ways.element
    hidden_passes = 1.0 if software.fused_experts else 2 + model.gated
    # Experts' biases are weighed, added and put together again in passes of their own, with three launches an expert
    # (Megatron-LM, core/transformer/moe/experts.py, _apply_bias), unless experts are one kernel.
    biased = model.biased * (0.0 if software.fused_experts else 1.0)
    permuted = permuted + biased * visits / ways.expert_tensor * routed_width * 6 * ways.element
    active = (visits * hidden * hidden_passes + tokens * shared * (2 + model.gated)) * ways.element
    router = own * (model.experts * 16 + model.width * ways.element)
    none = np.zeros(())
    # Grouped products launch one kernel for each local expert and product, and casts of their own below 16 bits.
    each = 0.0 if software.fused_experts else np.where(ways.precision > 1, 10.0, 4.0)
    return Demand(
        products=products, operands=operands, inputs=around[2] if software.fused_experts else inputs, scores=none,
        traffic=permuted + active + router + _residual_traffic(model, ways, software),
        kernels=MIXTURE_KERNELS + (each + 3 * biased) * local,
        score_traffic=none, syncs=1.0 if software.syncs else 0.0, redone=software.redone_experts,
        recorded=ROUTER_KERNELS if software.records_router else 0.0,
        renewed=active * software.redone_activations + _norm_traffic(model, ways) * software.redone_norms,
    )  # fmt: skip


def mamba_demand(model: ModelShape, ways: Strategies, software: Software) -> Demand:
    """Return what one Mamba-2 sublayer takes: two projections, a short convolution, and the scan in chunks of 128."""
    tokens, inner = ways.tokens, model.mamba_heads * model.mamba_width / ways.tensor
    mixed = 2 * model.mamba_groups * model.mamba_state / ways.tensor
    products, operands, inputs = _sum(
        _product(tokens, 2 * inner + mixed + model.mamba_heads / ways.tensor, model.width),
        _product(tokens, model.width, inner),
    )
    scan = tokens * inner * (4 * model.mamba_state + 128)
    traffic = tokens * (inner * 14 + mixed * 4) * ways.element + _residual_traffic(model, ways, software)
    return Demand(
        products=products, operands=operands, inputs=inputs, scores=scan, traffic=traffic, kernels=36.0,
        score_traffic=np.zeros(()), recorded=36.0 if software.records_mamba else 0.0,
    )  # fmt: skip


def head_demand(model: ModelShape, ways: Strategies) -> Demand:
    """Return what final norm, logits and cross entropy take."""
    tokens, rows = ways.tokens * model.outputs, model.vocabulary / ways.tensor
    products, operands, _ = _product(tokens, rows, model.width)
    none = np.zeros(())
    # The loss reads and writes the logits in float32: cast, maximum, difference, exponential and sum.
    traffic = tokens * rows * 18.0 + tokens * model.width * 2 * ways.element
    return Demand(
        products=products, operands=operands, inputs=none, scores=none, traffic=traffic, kernels=30.0,
        score_traffic=none,
    )  # fmt: skip


def embedding_traffic(model: ModelShape, ways: Strategies) -> Numbers:
    """Return bytes of looking tokens up, adding positions, and the gradient's scatter, forward and backward alike."""
    return ways.tokens * model.width * 4 * ways.element

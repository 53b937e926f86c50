"""A mixture is what its definition says, and no token's output depends on the tokens beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from supernode.errors import SpecError
from supernode.models.decoder import Decoder
from supernode.models.experts import Mixture
from supernode.schema.model import DecoderShape

SHAPE = DecoderShape(layers=2, width=8, heads=2, experts=5, experts_per_token=2, expert_hidden=6, vocabulary=11)


def built(shape: DecoderShape = SHAPE, *, dtype: torch.dtype = torch.float32) -> Mixture:
    torch.manual_seed(0)
    mixture = Mixture(shape)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter)
    return mixture.to(dtype)


def by_definition(mixture: Mixture, x: Tensor) -> Tensor:
    """Return every expert's output for every token, weighted by a softmax over the chosen scores alone."""
    scores = x @ mixture.router.weight.T
    least = scores.sort(dim=-1, descending=True).values[..., mixture.visits - 1 : mixture.visits]
    weights = scores.masked_fill(scores < least, -torch.inf).softmax(dim=-1)
    experts = mixture.experts
    made = [(F.silu(x @ experts.gate[e].T) * (x @ experts.up[e].T)) @ experts.down[e].T for e in range(experts.count)]
    return (torch.stack(made, dim=-2) * weights.unsqueeze(-1)).sum(dim=-2)


@pytest.mark.parametrize("visits", [1, 2, 5])
def test_outputs_and_gradients_are_those_of_the_definition(visits: int) -> None:
    mixture = built(replace(SHAPE, experts_per_token=visits))
    x, grad = torch.randn(3, 7, 8, requires_grad=True), torch.randn(3, 7, 8)
    wanted = [x, *mixture.parameters()]

    found = mixture(x)
    expected = by_definition(mixture, x)

    assert torch.allclose(found, expected, atol=1e-5)
    # With one expert the softmax is 1 whatever the score: the router learns nothing.
    gradients, theirs = (
        torch.autograd.grad(made, wanted, grad, allow_unused=True, materialize_grads=True) for made in (found, expected)
    )
    for one, other in zip(gradients, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-5 * float(1 + other.abs().max()))
    assert (float(gradients[1].abs().max()) < 1e-6) == (visits == 1)


def test_a_token_is_treated_alike_among_any_others() -> None:
    mixture = built()
    x = torch.randn(1, 40, 8)
    crowd = torch.cat((x, x[:, :1].expand(1, 200, 8)), dim=1)  # Many tokens want the first one's experts.
    order = torch.randperm(40)

    alone = mixture(x)

    assert torch.allclose(mixture(crowd)[:, :40], alone, atol=1e-6)
    assert torch.allclose(mixture(x[:, order]), alone[:, order], atol=1e-6)


def test_weights_are_found_in_float32_whatever_the_precision() -> None:
    mixture, x = built(dtype=torch.bfloat16), torch.randn(2, 9, 8).bfloat16()

    weights, experts = mixture.route(x)

    assert weights.dtype == torch.float32
    assert torch.allclose(weights.sum(dim=-1), torch.ones(2, 9), atol=1e-6)
    scores = x.double() @ mixture.router.weight.double().T
    assert torch.equal(experts, scores.topk(2, dim=-1).indices)
    assert mixture(x).dtype == torch.bfloat16


def test_a_decoder_with_experts_has_the_parameters_that_its_shape_counts() -> None:
    model = Decoder(SHAPE)

    assert sum(parameter.numel() for parameter in model.parameters()) == SHAPE.parameters
    # Per block: attention 4 × 8 × 8, router 5 × 8, experts 5 × 3 × 8 × 6, two norms.
    assert SHAPE.block_parameters == 256 + 40 + 720 + 16
    assert replace(SHAPE, expert_hidden=0).inner == 32  # as a gated MLP of that width has


@pytest.mark.parametrize("visits", [0, 6])
def test_more_visits_than_experts_are_refused(visits: int) -> None:
    with pytest.raises(SpecError, match=f"model.experts_per_token` is {visits} of 5 experts") as caught:
        replace(SHAPE, experts_per_token=visits)

    assert "1 to 5" in caught.value.hint

"""Split over the tensor axis or not, the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from supernode.errors import ModelError
from supernode.models.decoder import Decoder
from supernode.parallel.tensor import (
    IGNORED,
    SplitCrossEntropy,
    cross_entropy,
    first_of,
    split_block,
    split_embedding,
    split_head,
)
from supernode.schema.model import DecoderShape

Together = Callable[..., list[Any]]


def logits_and_target(vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(2, 6, vocabulary, generator=generator)
    target = torch.randint(vocabulary, (2, 6), generator=generator)
    target[0, 1] = target[1] = IGNORED
    return logits, target


def test_the_loss_is_the_sum_over_what_counts() -> None:
    logits, target = logits_and_target(7)

    expected = F.cross_entropy(logits[0, [0, 2, 3, 4, 5]], target[0, [0, 2, 3, 4, 5]], reduction="sum")

    assert cross_entropy(logits, target) == pytest.approx(float(expected))
    assert cross_entropy(logits[:, 0], target[:, 0]) == pytest.approx(
        float(F.cross_entropy(logits[:1, 0], target[:1, 0]))
    )
    assert cross_entropy(logits.bfloat16(), target).dtype == torch.float32


@pytest.mark.parametrize(
    ("output", "target", "words"),
    [
        (torch.zeros(()), torch.zeros(4, dtype=torch.long), r"returned \[\] for targets of \[4\]"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.long), r"returned \[4\] for targets of \[4\]"),
        (torch.zeros(3, 8), torch.zeros(4, dtype=torch.long), r"returned \[3, 8\] for targets of \[4\]"),
        (torch.zeros(4, 3), torch.tensor([0, 1, 6, 2]), r"targets go from 0 to 6, and the model returned 3 classes"),
    ],
)
def test_a_model_s_output_that_fits_no_target_is_told_with_both_shapes(
    output: Tensor, target: Tensor, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        cross_entropy(output, target)


# 7 over 2 leaves 4 and 3; 5 over 3 leaves 2, 2 and 1; 2 over 3 leaves the last rank without any.
@pytest.mark.parametrize(("vocabulary", "ranks"), [(8, 2), (7, 2), (5, 3), (2, 3), (1, 2)])
def test_a_split_vocabulary_gives_the_loss_and_the_gradient_of_the_whole(
    together: Together, vocabulary: int, ranks: int
) -> None:
    logits, target = logits_and_target(vocabulary)
    whole = logits.clone().requires_grad_()
    loss = 3.0 * cross_entropy(whole, target)
    loss.backward()

    def part(rank: int) -> tuple[float, Tensor]:
        group = dist.group.WORLD
        assert group is not None
        chunks = torch.chunk(logits, ranks, dim=-1)
        mine = chunks[rank] if rank < len(chunks) else logits[..., :0]
        mine = mine.clone().requires_grad_()
        value = 3.0 * SplitCrossEntropy(group, vocabulary)(mine, target)
        value.backward()
        assert mine.grad is not None
        return float(value.detach()), mine.grad

    parts = together(part, ranks=ranks)

    assert [value for value, _ in parts] == pytest.approx([float(loss.detach())] * ranks, rel=1e-6)
    assert whole.grad is not None
    assert torch.allclose(torch.cat([grad for _, grad in parts], dim=-1), whole.grad, atol=1e-6)


def test_huge_logits_do_not_overflow(together: Together) -> None:
    logits, target = torch.tensor([[1e4, 0.0, -1e4, 1e4]]), torch.tensor([1])

    def part(rank: int) -> float:
        assert dist.group.WORLD is not None
        return float(SplitCrossEntropy(dist.group.WORLD, 4)(torch.chunk(logits, 2, dim=-1)[rank], target))

    assert together(part) == pytest.approx([float(cross_entropy(logits, target))] * 2)


def test_parts_begin_where_torch_chunk_cuts(together: Together) -> None:
    def firsts(rank: int) -> list[int]:
        assert dist.group.WORLD is not None
        return [first_of(size, dist.group.WORLD) for size in (1, 2, 5, 6, 7, 9)]

    found = together(firsts, ranks=3)

    for place, size in enumerate((1, 2, 5, 6, 7, 9)):
        ends = [int(chunk[-1]) + 1 for chunk in torch.chunk(torch.arange(size), 3)]
        starts = ([0, *ends] + [size] * 3)[:3]
        assert [found[rank][place] for rank in range(3)] == starts


def test_a_decoder_split_over_two_computes_what_the_whole_one_does(together: Together) -> None:
    shape = DecoderShape(layers=2, width=16, heads=4, kv_heads=2, hidden=33, vocabulary=7)
    tokens = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(1))

    def built() -> Decoder:
        model = Decoder(shape)
        for name, parameter in model.named_parameters():
            model.initialise(name, parameter.detach(), torch.Generator().manual_seed(len(name)))
            parameter.data.mul_(5 if parameter.ndim > 1 else 1)
        return model

    def gradients(model: Decoder, loss: Tensor) -> dict[str, Tensor]:
        loss.backward()
        found = {}
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            assert grad is not None
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
        return found

    def part(rank: int) -> tuple[float, dict[str, Tensor], list[int]]:
        model = built()
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks.values():
            split_block(block, mesh)
        assert model.embedding is not None
        assert model.head is not None
        split_embedding(model.embedding, mesh)
        split_head(model.head, mesh)
        model.tie()
        value = SplitCrossEntropy(mesh.get_group(), 7)(model(tokens), tokens.roll(-1, 1))
        held = [p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()]
        return float(value.detach()), gradients(model, value), held

    parts = together(part)
    whole = built()
    loss = cross_entropy(whole(tokens), tokens.roll(-1, 1))
    expected = gradients(whole, loss)

    for value, found, _ in parts:
        assert value == pytest.approx(float(loss.detach()), rel=1e-6)
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            assert torch.allclose(found[name], grad, atol=1e-5), name
    norms = sum(p.numel() for name, p in whole.named_parameters() if "norm" in name)
    # Each rank holds a part of every matrix; only norms are held twice.
    assert sum(parts[0][2]) + sum(parts[1][2]) == shape.parameters + norms

"""The decoder is the one its shape describes, sees no future, and is the same whole or in pieces."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from supernode.models.decoder import Decoder, rotary_table, rotate
from supernode.schema.model import DecoderShape

SHAPE = DecoderShape(layers=5, width=32, heads=4, kv_heads=2, vocabulary=61)


def filled(shape: DecoderShape, **part: object) -> Decoder:
    """Return a decoder whose every parameter follows from its name, with weights large enough to matter."""
    module = Decoder(shape, **part)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            canonical = "embedding.weight" if name == "head.weight" and shape.tied else name
            seed = sum(ord(letter) * (place + 1) for place, letter in enumerate(canonical))
            module.initialise(canonical, parameter, torch.Generator().manual_seed(seed))
            parameter.mul_(1.0 if parameter.ndim < 2 else 5.0)
    return module.eval()


def tokens(count: int = 12, batch: int = 2) -> Tensor:
    return torch.randint(61, (batch, count), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [0, 1, 2])
@pytest.mark.parametrize("hidden", [0, 48])
def test_parameters_are_as_many_as_the_shape_says(tied: bool, kv_heads: int, hidden: int) -> None:
    shape = DecoderShape(layers=3, width=32, heads=4, kv_heads=kv_heads, hidden=hidden, vocabulary=61, tied=tied)

    with torch.device("meta"):
        model = Decoder(shape)

    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    assert sum(parameter.numel() for parameter in model.blocks["0"].parameters()) == shape.block_parameters


def test_gpt3_13b_has_about_13_billion_parameters() -> None:
    from supernode.schema.model import PRESETS

    # Its gated MLP of 8/3 of the width has as many parameters as the original's of 4 with two matrices.
    assert PRESETS["gpt3-13b"].parameters == pytest.approx(13e9, rel=0.03)
    # Grattafiori et al., arXiv:2407.21783: 8, 70 and 405 billion.
    assert PRESETS["llama3-8b"].parameters == pytest.approx(8.03e9, rel=0.001)
    assert PRESETS["llama3-70b"].parameters == pytest.approx(70.6e9, rel=0.001)
    assert PRESETS["llama3-405b"].parameters == pytest.approx(405.9e9, rel=0.001)


def test_tied_matrices_are_one() -> None:
    tied, apart = Decoder(SHAPE), Decoder(DecoderShape(layers=1, width=32, heads=4, vocabulary=61, tied=False))

    assert tied.embedding is not None
    assert tied.head is not None
    assert tied.head.weight is tied.embedding.weight
    assert apart.embedding is not None
    assert apart.head is not None
    assert apart.head.weight is not apart.embedding.weight


@pytest.mark.parametrize("cut", [(0, 5), (0, 3, 5), (0, 1, 2, 5)])
def test_the_pieces_one_after_the_other_are_the_whole(cut: tuple[int, ...]) -> None:
    x = tokens()
    expected = filled(SHAPE)(x)

    flow: Tensor = x
    for first, last in itertools.pairwise(cut):
        flow = filled(SHAPE, blocks=range(first, last), embeds=first == 0, heads=last == 5)(flow)

    assert torch.equal(flow, expected)


def test_names_are_those_of_the_whole_however_it_is_cut() -> None:
    whole = set(dict(Decoder(SHAPE).named_parameters(remove_duplicate=False)))
    pieces = [Decoder(SHAPE, blocks=range(2), heads=False), Decoder(SHAPE, blocks=range(2, 5), embeds=False)]

    assert set().union(*(dict(piece.named_parameters()) for piece in pieces)) == whole


def test_no_position_sees_the_future() -> None:
    model, x = filled(SHAPE), tokens()
    changed = x.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 61

    before, after = model(x), model(changed)

    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_a_rotated_product_depends_on_the_distance_alone() -> None:
    cosines, sines = rotary_table(64, 16, 10_000.0)
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(1)).unbind()

    def product(at: int, of: int) -> float:
        turned = [
            rotate(v.view(1, 1, 1, 16), cosines[p : p + 1], sines[p : p + 1]) for v, p in ((query, at), (key, of))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(10, 3) == pytest.approx(product(57, 50), abs=1e-5)
    assert product(0, 0) == pytest.approx(float(query @ key), abs=1e-6)
    assert abs(product(10, 3) - product(10, 4)) > 1e-3


def test_the_first_pair_turns_by_one_radian_a_position() -> None:
    cosines, sines = rotary_table(3, 4, 10_000.0)

    # Pairs (0, 2) and (1, 3); the second turns 1/100 as fast.
    assert cosines[2].tolist() == pytest.approx([math.cos(2), math.cos(0.02)] * 2)
    assert sines[1].tolist() == pytest.approx([math.sin(1), math.sin(0.01)] * 2)


def test_grouped_keys_are_keys_repeated() -> None:
    grouped = filled(SHAPE)
    full = filled(DecoderShape(layers=5, width=32, heads=4, kv_heads=4, vocabulary=61))
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            given = dict(grouped.named_parameters())[name]
            if name.endswith(("key.weight", "value.weight")):
                given = given.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
            parameter.copy_(given)

    assert torch.allclose(full(tokens()), grouped(tokens()), atol=1e-5)


def test_dropout_drops_in_training_alone_and_follows_the_generator() -> None:
    model = filled(DecoderShape(layers=2, width=32, heads=4, vocabulary=61, dropout=0.5))
    x = tokens()

    quiet = model(x)
    model.train()
    torch.manual_seed(3)
    first = model(x)
    second = model(x)
    torch.manual_seed(3)
    again = model(x)

    assert torch.equal(quiet, model.eval()(x))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_a_longer_sequence_after_a_shorter_one_gets_its_own_angles() -> None:
    model = filled(SHAPE)

    model(tokens(4))
    longer = model(tokens(12))

    assert torch.equal(longer, filled(SHAPE)(tokens(12)))


def test_first_values_are_as_spread_as_said() -> None:
    model = Decoder(DecoderShape(layers=8, width=256, heads=4, vocabulary=1000))
    values = {}
    for name in ("embedding.weight", "blocks.0.attention.query.weight", "blocks.0.attention.out.weight", "norm.weight"):
        parameter = model.get_parameter(name).detach()
        model.initialise(name, parameter, torch.Generator().manual_seed(0))
        values[name] = parameter

    # 0.02, and 0.02 / √(2·8) where a branch joins the stream; 65 536 numbers scatter by 0.3 %.
    assert float(values["embedding.weight"].std()) == pytest.approx(0.02, rel=0.02)
    assert float(values["blocks.0.attention.query.weight"].std()) == pytest.approx(0.02, rel=0.02)
    assert float(values["blocks.0.attention.out.weight"].std()) == pytest.approx(0.005, rel=0.02)
    assert torch.equal(values["norm.weight"], torch.ones(256))


def test_it_is_an_ordinary_module() -> None:
    assert isinstance(Decoder(SHAPE), nn.Module)
    assert list(Decoder(SHAPE).buffers()) == []

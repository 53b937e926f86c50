"""Weights of others arrive under the right names, in the right order of rows, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from supernode.checkpoint.source import fill
from supernode.errors import CheckpointError
from supernode.foreign.look import look
from supernode.foreign.match import match_decoder, match_module
from supernode.foreign.naming import NAMINGS, halves_from_pairs, pairs_from_halves, shapes_of
from supernode.foreign.source import Renamed
from supernode.models.decoder import Decoder, rotary_table, rotate
from supernode.schema.model import DecoderShape

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # One process saves here.

SHAPE = DecoderShape(layers=2, width=16, heads=4, kv_heads=2, hidden=24, vocabulary=11, tied=False)


def weights(shape: DecoderShape = SHAPE, names: str = "llama") -> dict[str, Tensor]:
    """Return random weights under the names of a trainer; their rows stand as they happen to."""
    dice = torch.Generator().manual_seed(1)
    return {NAMINGS[names].of(name): torch.randn(size, generator=dice) for name, size in shapes_of(shape).items()}


def loaded(path: Path, shape: DecoderShape = SHAPE) -> dict[str, Tensor]:
    """Return our decoder's tensors as a path fills them."""
    found = {name: torch.zeros(size) for name, size in shapes_of(shape).items()}
    fill(found, Renamed(match_decoder(look(path), shape)))
    return found


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, tied=True), replace(SHAPE, experts=4, expert_hidden=8)])
def test_the_names_and_shapes_are_those_of_the_decoder(shape: DecoderShape) -> None:
    own = {name: tuple(parameter.shape) for name, parameter in Decoder(shape).named_parameters()}

    assert shapes_of(shape) == own


def test_rows_in_pairs_are_turned_as_halves_are() -> None:
    # Neighbouring numbers taken as complex and turned, as torchtitan does, give the scores that our halves give.
    heads, width, tokens = 3, 8, 5
    dice = torch.Generator().manual_seed(0)
    in_pairs = torch.randn(tokens, 2, heads * width, generator=dice)
    pairs = torch.arange(0, width, 2) / width
    turn = torch.polar(torch.ones(tokens, width // 2), torch.outer(torch.arange(tokens), 100.0**-pairs))
    by_head = in_pairs.view(tokens, 2, heads, width // 2, 2)
    turned = torch.view_as_real(torch.view_as_complex(by_head) * turn[:, None, None]).flatten(-2)
    expected = torch.einsum("thk,shk->hts", turned[:, 0], turned[:, 1])

    order = halves_from_pairs(heads * width, heads)
    ours = in_pairs[..., order].view(tokens, 2, heads, width).permute(1, 2, 0, 3)
    queries, keys = rotate(ours, *rotary_table(tokens, width, 100.0))

    assert torch.allclose(queries @ keys.transpose(1, 2), expected, atol=1e-5)
    assert [order[row] for row in pairs_from_halves(heads * width, heads)] == list(range(heads * width))


def test_every_kind_of_file_gives_the_same(tmp_path: Path) -> None:
    theirs = weights()
    save_file(theirs, tmp_path / "one.safetensors")
    dcp.save({"model": theirs, "optimizer": {"lr": 1.0}, "step": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    titan = {NAMINGS["titan"].of(name): theirs[NAMINGS["llama"].of(name)] for name in shapes_of(SHAPE)}
    dcp.save(titan, checkpoint_id=tmp_path / "titan", no_dist=True)

    file, plain, other = loaded(tmp_path / "one.safetensors"), loaded(tmp_path / "dcp"), loaded(tmp_path / "titan")

    for name, tensor in file.items():
        assert torch.equal(tensor, theirs[NAMINGS["llama"].of(name)]), name
        assert torch.equal(tensor, plain[name]), name
        heads = {"query": 4, "key": 2}.get(name.split(".")[-2], 0)
        expected = tensor[halves_from_pairs(len(tensor), heads)] if heads else tensor
        assert torch.equal(other[name], expected), name


def test_numbers_are_cast_to_the_precision_of_the_model(tmp_path: Path) -> None:
    theirs = weights()
    save_file(theirs, tmp_path / "float32.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in theirs.items()}, tmp_path / "bfloat16.safetensors")
    half = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in shapes_of(SHAPE).items()}
    fill(half, Renamed(match_decoder(look(tmp_path / "float32.safetensors"), SHAPE)))
    whole = loaded(tmp_path / "bfloat16.safetensors")

    for name, tensor in half.items():
        assert torch.equal(tensor, theirs[NAMINGS["llama"].of(name)].bfloat16()), name
        assert torch.equal(whole[name], tensor.float()), name


class Small(nn.Module):
    """Two layers that share a matrix, and a count that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(5))


def test_a_checkpoint_of_two_ranks_under_fsdp_is_read(together: Callable[..., Any], tmp_path: Path) -> None:
    def save(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        dcp.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=str(tmp_path / "fsdp")
        )

    together(save)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(whole.parameters())
    whole(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    found = {name: torch.zeros_like(tensor) for name, tensor in whole.state_dict().items()}
    match = match_module(look(tmp_path / "fsdp"), {name: tuple(tensor.shape) for name, tensor in found.items()})
    fill(found, Renamed(match))

    assert {name for name in match.left if name.startswith("optimizer.")} == set(match.left) != set()
    for name, tensor in whole.state_dict().items():
        assert torch.allclose(found[name], tensor, rtol=1e-6), name


def test_ties_may_stand_twice_if_they_are_alike(tmp_path: Path) -> None:
    state = Small().state_dict()
    state = {name: tensor.clone() for name, tensor in state.items()}
    dcp.save(state, checkpoint_id=tmp_path / "twice", no_dist=True)
    state["second.weight"][0, 0] += 1
    dcp.save(state, checkpoint_id=tmp_path / "apart", no_dist=True)
    wanted: dict[str, tuple[int, ...]] = {"first.weight": (6, 6), "first.bias": (6,), "count": ()}
    ties = [("first.weight", "second.weight")]

    Renamed(match_module(look(tmp_path / "twice"), wanted, ties)).check_ties()
    apart = Renamed(match_module(look(tmp_path / "apart"), wanted, ties))

    with pytest.raises(CheckpointError, match=r"`first\.weight` and `second\.weight` of .* differ"):
        apart.check_ties()
    with pytest.raises(CheckpointError, match=r"also holds `second\.weight`"):
        match_module(look(tmp_path / "twice"), wanted)
    with pytest.raises(CheckpointError, match=r"(?s)no `first\.wieght`.*it holds `first\.weight`"):
        match_module(look(tmp_path / "twice"), {"first.wieght": (6, 6), "first.bias": (6,)})


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        (("model.layers.1.mlp.up_proj.weight", None), {}, r"holds no `model\.layers\.1\.mlp\.up_proj\.weight`"),
        (("model.layers.0.self_attn.q_proj.bias", 16), {}, r"also holds `.*q_proj\.bias`.*your own module"),
        ((None, None), {"layers": 1}, r"also holds `model\.layers\.1\..*set `model\.layers` to 2"),
        ((None, None), {"layers": 3}, r"holds no `model\.layers\.2\..*set `model\.layers` to 2"),
        ((None, None), {"vocabulary": 12}, r"embed_tokens\.weight` is \[11, 16\].*set `model\.vocabulary` to 11"),
        ((None, None), {"hidden": 32}, r"gate_proj\.weight` is \[24, 16\].*set `model\.hidden` to 24"),
        ((None, None), {"kv_heads": 4}, r"k_proj\.weight` is \[8, 16\].*set `model\.kv_heads` to 2"),
        ((None, None), {"tied": True}, r"differ"),
        (("lm_head.weight", None), {}, r"holds no `lm_head\.weight`.*set `model\.tied` to true"),
        ((None, None), {"experts": 2}, r"none for `blocks\.0\.mlp\.router\.weight`.*`model\.experts` to 0"),
    ],
)
def test_what_does_not_fit_is_named_with_a_remedy(
    tmp_path: Path, change: tuple[str | None, int | None], model: dict[str, Any], message: str
) -> None:
    theirs = weights()
    name, size = change
    if name is not None and size is None:
        del theirs[name]
    elif name is not None and size is not None:
        theirs[name] = torch.zeros(size)
    save_file(theirs, tmp_path / "model.safetensors")

    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        Renamed(match_decoder(look(tmp_path), replace(SHAPE, **model))).check_ties()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"num_attention_heads": 8}, "set `model.heads` to 8"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, "set `model.kv_heads` to 4"),
        ({"num_key_value_heads": 2, "rope_theta": 5e5}, "set `model.rope_base` to 500000.0"),
        ({"num_key_value_heads": 2, "rope_scaling": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type llama3"),
        ({"num_key_value_heads": 2, "rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06"),
        ({"num_key_value_heads": 2, "tie_word_embeddings": True}, "set `model.tied` to true"),
    ],
)
def test_what_shapes_do_not_tell_is_read_from_the_config(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(said))

    with pytest.raises(CheckpointError, match=f"(?s)config.json says.*{message}"):
        match_decoder(look(tmp_path), SHAPE)

"""A run begins from weights that others left, in any layout, with the very loss that they have on the same tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from supernode.control.leaving import export
from supernode.data.corpus import load_tokens, open_corpus
from supernode.data.sampler import Sampler
from supernode.errors import CheckpointError
from supernode.foreign.naming import NAMINGS, shapes_of
from supernode.schema.model import DecoderShape
from supernode.storing.saves import name_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SHAPE = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 48, "vocabulary": 260, "rope_base": 5000.0}
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 260, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "use_cache": False,
}  # fmt: skip
MODULE = f"""
def theirs():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **{CONFIG!r}))
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Return models of transformers with the folders that they saved themselves to."""
    folder, found = tmp_path_factory.mktemp("theirs"), {}
    for name, tied, kind in (("apart", False, torch.float32), ("tied", True, torch.bfloat16)):
        torch.manual_seed(3)
        config = transformers.LlamaConfig(tie_word_embeddings=tied, initializer_range=0.1, **CONFIG)
        model = transformers.LlamaForCausalLM(config).to(kind).eval()
        model.save_pretrained(folder / name, max_shard_size="20KB" if name == "apart" else "1GB")
        found[name] = model.float(), folder / name
    assert len(list((folder / "apart").glob("*.safetensors"))) > 2
    return found


def first_loss(model: Any, run: Path, job: dict[str, Any]) -> float:
    """Return what a model of transformers says of the samples of a run's first step."""
    corpus = open_corpus(run / "data")
    tokens = torch.tensor(load_tokens(corpus.train, corpus.dtype).astype("int64"))
    sequence = job["data"]["sequence"]
    chosen = Sampler((len(tokens) - 1) // sequence, job["batch"], 0, False).indices(0)
    windows: Tensor = torch.stack([tokens[int(i) * sequence : int(i) * sequence + sequence + 1] for i in chosen])
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
    return float(F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


def job_of(workshop: Any, layout: dict[str, int], model: Any, weights: Path, **changes: Any) -> dict[str, Any]:
    """Return a job of one step that changes nothing."""
    return dict(
        workshop.job(
            layout, model=model, weights=str(weights), steps=1, seed=0, optimizer={"learning_rate": 0.0}, **changes
        )
    )


def test_a_run_begins_with_the_loss_that_transformers_has(workshop: Any, theirs: Any, tmp_path: Path) -> None:
    model, folder = theirs["apart"]
    one = job_of(workshop, {"data": 1}, SHAPE | {"tied": False}, folder)
    workshop.run(one, tmp_path / "one")
    expected = first_loss(model, tmp_path / "one", one)
    cut = job_of(workshop, {"tensor": 2, "pipeline": 2, "data": 1}, SHAPE | {"tied": False}, folder)
    workshop.run(cut, tmp_path / "cut")
    # One of ours, which one rank wrote, into four, whose weights are sharded too.
    again = tmp_path / "one" / "checkpoints" / name_of(1)
    sharded = cut | {"weights": str(again), "parallelism": {"tensor": 2, "data": 2, "sharding": "fsdp"}}
    workshop.run(sharded, tmp_path / "again")

    assert workshop.losses(tmp_path / "one")[1] == pytest.approx(expected, rel=1e-5)
    assert workshop.losses(tmp_path / "cut")[1] == pytest.approx(expected, rel=1e-5)
    assert workshop.losses(tmp_path / "again")[1] == pytest.approx(expected, rel=1e-5)
    for name, tensor in workshop.tensors(tmp_path / "cut", 1).items():
        if name.startswith("model."):
            assert torch.equal(tensor, workshop.tensors(tmp_path / "one", 1)[name]), name
            assert torch.equal(tensor, workshop.tensors(tmp_path / "again", 1)[name]), name


def test_tied_weights_of_16_bits_begin_a_run_in_32(workshop: Any, theirs: Any, tmp_path: Path) -> None:
    model, folder = theirs["tied"]
    cut = job_of(workshop, {"tensor": 2, "pipeline": 2, "data": 1}, SHAPE | {"tied": True}, folder)
    workshop.run(cut, tmp_path / "cut")
    (tmp_path / "module.py").write_text(MODULE)
    own = job_of(workshop, {"tensor": 2, "data": 1}, f"{tmp_path / 'module.py'}:theirs", folder)
    workshop.run(own, tmp_path / "own")

    expected = first_loss(model, tmp_path / "cut", cut)
    assert workshop.losses(tmp_path / "cut")[1] == pytest.approx(expected, rel=1e-5)
    assert workshop.losses(tmp_path / "own")[1] == pytest.approx(expected, rel=1e-5)


def test_weights_of_another_model_are_refused_before_a_run_has_a_folder(
    workshop: Any, theirs: Any, tmp_path: Path
) -> None:
    _, folder = theirs["apart"]
    job = job_of(workshop, {"data": 1}, SHAPE | {"tied": False, "layers": 4}, folder)

    with pytest.raises(CheckpointError, match=r"(?s)holds no `model\.layers\.3\..*set `model\.layers` to 3") as refused:
        workshop.run(job, tmp_path / "run")
    assert refused.value.exit_code == 2
    assert not (tmp_path / "run").exists()


PLAIN = f"""
import sys, warnings
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **{CONFIG!r}))
optimizer = torch.optim.AdamW(model.parameters(), lr=123.0, betas=(0.1, 0.2))
weights, moments = get_state_dict(model, optimizer)
state = {{"model": weights, "optimizer": moments}}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
group = optimizer.param_groups[0]
named = dict(model.named_parameters())
torch.save(
    {{
        "weights": {{name: p.detach() for name, p in named.items()}},
        "moments": {{name: dict(optimizer.state[p]) for name, p in named.items()}},
        "rate": group["lr"], "betas": group["betas"],
    }},
    sys.argv[2],
)
assert not [name for name in sys.modules if name.startswith("supernode")]
"""


def test_ours_go_on_in_transformers_and_in_plain_pytorch(workshop: Any, theirs: Any, tmp_path: Path) -> None:
    _, folder = theirs["apart"]
    job = job_of(workshop, {"tensor": 2, "data": 1}, SHAPE | {"tied": False}, folder)
    job |= {"steps": 3, "optimizer": {"learning_rate": 1e-2, "decay": "cosine"}}
    workshop.run(job, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hf", names="llama", most=20_000)
    export(tmp_path / "run", tmp_path / "dcp", format="dcp", names="llama", everything=True)
    export(tmp_path / "run", tmp_path / "titan", format="dcp", names="titan")

    model, told = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    words = (sys.executable, "-c", PLAIN, str(tmp_path / "dcp"), str(tmp_path / "found.pt"))
    plain = subprocess.run(words, capture_output=True, text=True, check=False)
    assert plain.returncode == 0, plain.stderr
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    again = job | {"steps": 1, "seed": 0, "optimizer": {"learning_rate": 0.0}}
    for name in ("hf", "dcp", "titan"):
        workshop.run(again | {"weights": str(tmp_path / name)}, tmp_path / f"from-{name}")

    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    expected = first_loss(model.eval(), tmp_path / "from-hf", job)
    ours = workshop.tensors(tmp_path / "run", 3)
    named = {NAMINGS["llama"].of(name): name for name in shapes_of(DecoderShape(**SHAPE | {"tied": False}))}
    for theirs_name, name in named.items():
        assert torch.equal(found["weights"][theirs_name], ours[f"model.{name}"]), name
        held = found["moments"][theirs_name]
        assert torch.equal(held["exp_avg"], ours[f"optimizer.{name}.exp_avg"]), name
        assert torch.equal(held["exp_avg_sq"], ours[f"optimizer.{name}.exp_avg_sq"]), name
        assert float(held["step"]) == 3
    assert found["rate"] == pytest.approx(1e-3)  # A tenth of the highest rate, at the last step.
    assert tuple(found["betas"]) == (0.9, 0.95)
    for name in ("hf", "dcp", "titan"):
        assert workshop.losses(tmp_path / f"from-{name}")[1] == pytest.approx(expected, rel=1e-5), name
        for own, tensor in workshop.tensors(tmp_path / f"from-{name}", 1).items():
            assert not own.startswith("model.") or torch.equal(tensor, ours[own]), (name, own)

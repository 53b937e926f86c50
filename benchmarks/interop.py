"""Do weights of others load here, and ours there, to the same loss? transformers, plain PyTorch and torchtitan.

All windows of a small file of tokens are one batch, so that every trainer sees the same whatever its order. Each leg is
one comparison: what the other says of these tokens against what we say, with the weights that one of us wrote. Needs
no card and no network; torchtitan is installed on first use, and its legs are left out where it cannot be.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.nn import functional as F

import harness
import supernode
from step_time import PEERS
from supernode.checkpoint.source import fill, on_disk, tensors_of
from supernode.control.journal import read
from supernode.control.leaving import export
from supernode.control.supernode import SuperNode
from supernode.control.training import start
from supernode.data.corpus import load_tokens, open_corpus
from supernode.foreign.look import look
from supernode.foreign.match import match_decoder
from supernode.foreign.source import Renamed
from supernode.intake.jobfile import job_from
from supernode.models.decoder import Decoder
from supernode.schema.event import StepDone
from supernode.schema.model import DecoderShape

HERE = Path(__file__).parent
SHAPE = DecoderShape(
    layers=4, width=64, heads=4, kv_heads=2, hidden=160, vocabulary=256, tied=False, rope_base=20_000.0
)
SEQUENCE, WINDOWS, RATE, SEED = 32, 24, 3e-3, 0
PERIOD = 8
"""Tokens that stand four times in a row."""
LEARNED = 80
"""Steps of torchtitan before it saves, so that its weights say something of positions."""
LAYOUTS = {"one": {"data": 1}, "cut": {"tensor": 2, "pipeline": 2, "data": 1}}
PLAIN = """
import sys, warnings, torch, torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
sizes = torch.load(sys.argv[2], weights_only=True)
state = {"model": {name: torch.full_like(tensor, torch.nan) for name, tensor in sizes["weights"].items()},
         "optimizer": {"state": {name: {key: torch.full_like(value, torch.nan) for key, value in held.items()}
                                 for name, held in sizes["moments"].items()}}}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
assert not any(name.startswith("supernode") for name in sys.modules)
same = all(torch.equal(tensor, sizes["weights"][name]) for name, tensor in state["model"].items())
same &= all(torch.equal(value, sizes["moments"][name][key])
            for name, held in state["optimizer"]["state"].items() for key, value in held.items())
print(int(same))
"""


class Bench:
    """A folder, tokens in it, and runs of our trainer on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens = folder / "tokens.npy"
        # Each token comes back after some others, so that attention by position has something to learn.
        drawn = np.random.default_rng(SEED).integers(
            SHAPE.vocabulary, size=(WINDOWS * SEQUENCE // (2 * PERIOD), PERIOD)
        )
        np.save(self.tokens, np.repeat(drawn, 4, axis=0).reshape(-1).astype(np.uint16))
        self.node = SuperNode.discover(8)
        self.windows = 0
        self.train(self.folder / "measure", steps=1, batch=1)
        corpus = open_corpus(self.folder / "measure" / "data")
        self.seen = np.asarray(load_tokens(corpus.train, corpus.dtype)).astype(np.int64)
        self.windows = (len(self.seen) - 1) // SEQUENCE

    def train(
        self, run: Path, *, steps: int, weights: Path | None = None, layout: str = "one", rate: float = RATE,
        batch: int = 0, shape: DecoderShape = SHAPE, **keys: Any,
    ) -> list[float]:  # fmt: skip
        """Train a little on one batch of all windows; returns the loss of each step."""
        job = {
            "name": "interop", "model": asdict(shape), "data": {"tokens": str(self.tokens), "sequence": SEQUENCE},
            "batch": batch or self.windows, "gradient_accumulation": 2 if batch != 1 else 1, "steps": steps,
            "seed": SEED, "threads": 1, "parallelism": LAYOUTS[layout], "optimizer": {"learning_rate": rate},
            "checkpoint": {"every": 1, "keep": 10}, "weights": str(weights or ""), "evaluate": {"batches": 1},
        } | keys  # fmt: skip
        if job["batch"] % 2:
            job["gradient_accumulation"] = 1
        start(self.node.pool, job_from(job), folder=run)
        return [event.loss for _, event in read(run / "journal.db") if isinstance(event, StepDone)]

    def all_windows(self) -> torch.Tensor:
        """Return every window with the token that follows it, (windows, sequence + 1)."""
        starts = range(0, self.windows * SEQUENCE, SEQUENCE)
        return torch.stack([torch.from_numpy(self.seen[at : at + SEQUENCE + 1]) for at in starts])

    def loss_of(self, model: Any) -> float:
        """Return what a model of transformers says of all windows."""
        windows = self.all_windows()
        with torch.no_grad():
            return float(F.cross_entropy(model(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten()))


def gap(one: float, other: float) -> float:
    """Return how far apart two losses are, over the first."""
    return abs(one - other) / abs(one)


def with_transformers(bench: Bench) -> dict[str, Any]:
    """Let transformers' Llama begin our runs, and ours be loaded by it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    found: dict[str, Any] = {}
    for tied in (False, True):
        name = "tied" if tied else "untied"
        shape = replace(SHAPE, tied=tied)
        torch.manual_seed(1)
        theirs = LlamaForCausalLM(LlamaConfig(
            num_hidden_layers=SHAPE.layers, hidden_size=SHAPE.width, num_attention_heads=SHAPE.heads,
            num_key_value_heads=SHAPE.key_heads, intermediate_size=SHAPE.inner, vocab_size=SHAPE.vocabulary,
            rms_norm_eps=1e-5, tie_word_embeddings=tied, use_cache=False, initializer_range=0.1,
            rope_parameters={"rope_type": "default", "rope_theta": SHAPE.rope_base},
        )).eval()  # fmt: skip
        folder = bench.folder / f"hf-{name}"
        theirs.save_pretrained(folder, max_shard_size="100KB")
        expected = bench.loss_of(theirs)
        for layout in LAYOUTS:
            losses = bench.train(bench.folder / f"{folder.name}-{layout}", steps=2, weights=folder, layout=layout,
                                 shape=shape)  # fmt: skip
            found[f"from_{name}_{layout}"] = gap(expected, losses[0])
        run = bench.folder / f"{folder.name}-cut"
        export(run, bench.folder / f"ours-{name}", "1", names="llama", most=100_000)
        back, told = LlamaForCausalLM.from_pretrained(bench.folder / f"ours-{name}", output_loading_info=True)
        found[f"to_{name}"] = gap(bench.loss_of(back.eval()), losses[1])
        found[f"to_{name}_keys_amiss"] = sum(len(told[key]) for key in ("missing_keys", "unexpected_keys"))
    return found


def with_plain_pytorch(bench: Bench) -> dict[str, Any]:
    """Let a process without supernode load ours with `dcp.load`, and load here what it would write."""
    run, out = bench.folder / "plain", bench.folder / "plain-dcp"
    losses = bench.train(run, steps=3, layout="cut")
    export(run, out, "2", format="dcp", everything=True)
    ours = dict(tensors_of(on_disk(run / "checkpoints" / "step-00000002")))
    weights = {name.removeprefix("model."): t for name, t in ours.items() if name.startswith("model.")}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in ours.items():
        if name.startswith("optimizer."):
            owner, _, key = name.removeprefix("optimizer.").rpartition(".")
            moments.setdefault(owner, {"step": torch.tensor(2.0)})[key] = tensor
    torch.save({"weights": weights, "moments": moments}, bench.folder / "expected.pt")
    words = [sys.executable, "-c", PLAIN, str(out), str(bench.folder / "expected.pt")]
    same = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == "1"
    dcp.save({"model": weights, "optimizer": {"lr": 1.0}}, checkpoint_id=bench.folder / "theirs", no_dist=True)
    back = bench.train(bench.folder / "plain-back", steps=1, weights=bench.folder / "theirs")
    return {"to_is_same_to_the_bit": same, "tensors": len(weights), "from": gap(losses[2], back[0])}


def with_torchtitan(bench: Bench) -> dict[str, Any]:
    """Let a checkpoint that torchtitan wrote begin a run, and torchtitan begin from ours."""
    python = harness.peer_python("torchtitan", exactly=PEERS["torchtitan"].exactly, needs=PEERS["torchtitan"].needs)
    wrote = _torchtitan(bench, python, "titan-writes", steps=LEARNED + 1, save_every=LEARNED)
    theirs = bench.folder / "titan-writes" / "checkpoint" / f"step-{LEARNED}"
    found = {
        f"from_{layout}": gap(wrote[LEARNED], bench.train(bench.folder / f"titan-{layout}", steps=3, weights=theirs,
                                                    layout=layout)[0]) for layout in LAYOUTS
    }  # fmt: skip
    # What the comparison is worth: the gap that rows in the wrong order would leave.
    found["apart_with_rows_unturned"] = gap(wrote[LEARNED], _unturned(bench, theirs))
    found["moved"] = gap(wrote[0], wrote[LEARNED])
    ours = [event.loss for _, event in read(bench.folder / "titan-cut" / "journal.db") if isinstance(event, StepDone)]
    export(bench.folder / "titan-cut", bench.folder / "for-titan", "2", format="dcp", names="titan")
    reads = _torchtitan(bench, python, "titan-reads", steps=1, load=bench.folder / "for-titan")
    return found | {"to": gap(ours[2], reads[0])}


def _unturned(bench: Bench, theirs: Path) -> float:
    """Return our loss where rows of queries and keys are left as torchtitan orders them."""
    match = match_decoder(look(theirs), SHAPE)
    model = Decoder(SHAPE)
    plain = replace(match, taken={name: replace(taken, heads=0) for name, taken in match.taken.items()})
    fill({name: parameter.detach() for name, parameter in model.named_parameters()}, Renamed(plain))
    with torch.no_grad():
        windows = bench.all_windows()
        return float(F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()))


def _torchtitan(
    bench: Bench, python: Path, name: str, *, steps: int, save_every: int = 0, load: Path | None = None
) -> list[float]:
    folder = bench.folder / name
    folder.mkdir()
    np.save(folder / "tokens.npy", bench.seen)
    orders = {
        "package": str(Path(supernode.__file__).parents[1]), "tokens": str(folder / "tokens.npy"),
        "shape": asdict(SHAPE), "inner": SHAPE.inner, "parameters": SHAPE.parameters, "sequence": SEQUENCE,
        "batch": bench.windows, "steps": steps, "learning_rate": RATE, "answer": str(folder),
    }  # fmt: skip
    (folder / "orders.json").write_text(json.dumps(orders))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0",
        "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    told = json.dumps({"save_every": save_every, "load": str(load or "")})
    script = HERE / "peers" / "torchtitan_exchange.py"
    done = subprocess.run([str(python), str(script), str(folder / "orders.json"), told], cwd=folder, env=env,
                          capture_output=True, text=True, timeout=240, check=False)  # fmt: skip
    if done.returncode:
        raise harness.PeerMissingError("\n".join(["torchtitan failed:", *done.stderr.splitlines()[-12:]]))
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


def main() -> None:
    """Run every leg."""
    flags: argparse.Namespace = harness.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    with harness.scratch() as folder:
        bench = Bench(folder)
        result: dict[str, Any] = {"transformers": with_transformers(bench), "pytorch": with_plain_pytorch(bench)}
        try:
            result["torchtitan"] = with_torchtitan(bench)
        except harness.PeerMissingError as error:
            result["torchtitan"] = {"left_out": str(error)}
    gaps = [
        value for leg in result.values() for key, value in leg.items()
        if key.startswith(("from", "to")) and isinstance(value, float)
    ]  # fmt: skip
    result["largest_gap"] = max(gaps)
    result["machine"] = harness.machine("torch", "transformers", "safetensors")
    harness.finish(result, flags)


if __name__ == "__main__":
    main()

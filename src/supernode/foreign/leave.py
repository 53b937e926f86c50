"""Under what names, in what order of rows, and with what beside them do our tensors leave for other trainers?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from supernode.errors import BY_NAME, CheckpointError, MachineError, SpecError
from supernode.foreign.match import EPSILON
from supernode.foreign.naming import NAMINGS, heads_in_pairs
from supernode.registry import did_you_mean
from supernode.schema.job import OptimizerSpec
from supernode.schema.model import DecoderShape

WEIGHTS = ("model.", "buffer.0.")
"""How the names of what a model is made of begin in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A tensor of a checkpoint that leaves.

    Attributes:
        own: its name in the checkpoint.
        heads: whose rows are put in pairs; 0 leaves rows as they are.
    """

    own: str
    heads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the process that writes a checkpoint of PyTorch is told, as JSON.

    Attributes:
        disks: that hold the checkpoint.
        name: of the checkpoint.
        out: folder to write; it is there already, and empty.
        weights: by the names that they leave under.
        under: key of the state dict that they stand under; empty for none.
        moments: of the optimizer, by the parameter's name there, then by what they are.
        step: that the optimizer has taken.
        optimizer: settings of the run's.
        rate: at that step.
    """

    disks: Sequence[str]
    name: str
    out: str
    weights: Mapping[str, Leaving]
    under: str
    moments: Mapping[str, Mapping[str, Leaving]]
    step: int
    optimizer: OptimizerSpec | None
    rate: float


def weights_under(
    names: str, own: Iterable[str], shape: DecoderShape | None, *, twice: bool = False
) -> dict[str, Leaving]:
    """Return what leaves of a checkpoint's tensors as weights, by the name that it leaves under.

    Args:
        names: whose, one of `NAMINGS`.
        own: names in the checkpoint.
        shape: of our decoder; None for a user's own module.
        twice: give a tied head its own name as well, as plain state dicts do.

    Raises:
        SpecError: nobody has these names, or not for a module of one's own.
        ModelError: a tensor has no counterpart under these names.
    """
    if names not in NAMINGS:
        raise SpecError(f"`--names` is {names!r}", hint=did_you_mean(names, list(NAMINGS)))
    plain = {one.removeprefix(prefix): one for one in own for prefix in WEIGHTS if one.startswith(prefix)}
    if shape is None:
        if names != "ours":
            raise SpecError(
                f"`--names` is {names}, and the model is your own module, whose names leave as they are",
                hint="leave `--names` out.",
            )
        return {name: Leaving(own=one) for name, one in plain.items()}
    naming = NAMINGS[names]
    found = {
        naming.of(name): Leaving(own=one, heads=heads_in_pairs(name, naming, shape)) for name, one in plain.items()
    }
    if twice and shape.tied:
        found[naming.of("head.weight")] = Leaving(own=plain["embedding.weight"])
    return found


def moments_under(weights: Mapping[str, Leaving], own: Iterable[str]) -> dict[str, dict[str, Leaving]]:
    """Return what the optimizer keeps of each parameter, by the parameter's new name; its rows stand as that's do."""
    found: dict[str, dict[str, Leaving]] = {}
    held: dict[str, list[str]] = {}
    for one in own:
        if one.startswith("optimizer."):
            held.setdefault(one.removeprefix("optimizer.").rpartition(".")[0], []).append(one)
    seen: set[str] = set()
    for theirs, leaving in weights.items():
        name = leaving.own.removeprefix("model.")
        if leaving.own.startswith("model.") and name in held and name not in seen:
            seen.add(name)
            found[theirs] = {
                one.rpartition(".")[2]: Leaving(own=one, heads=leaving.heads) for one in sorted(held[name])
            }
    return found


def llama_config(shape: DecoderShape, *, kind: str, positions: int) -> dict[str, Any]:
    """Return what `transformers` must know of our decoder besides its tensors.

    Args:
        shape: its vocabulary is set.
        kind: of the weights' numbers, as torch calls it.
        positions: tokens of the longest sequence that it was trained on.
    """
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": kind,
        "vocab_size": shape.vocabulary, "hidden_size": shape.width, "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_width, "rms_norm_eps": EPSILON, "tie_word_embeddings": shape.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base}, "rope_theta": shape.rope_base,
        "max_position_embeddings": positions, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def write_dcp(request: Request) -> None:
    """Write a checkpoint of PyTorch in a process of its own, which loads torch.

    Raises:
        CheckpointError: a tensor cannot be read, or the process fails.
        MachineError: torch is not installed, or the disk is full.
    """
    if find_spec("torch") is None:
        raise MachineError(
            "torch is not installed, and its checkpoints are written by it",
            hint="install it with `pip install 'supernode-sdk[train]'`, or leave out `--format dcp`.",
        )
    asked = json.dumps(asdict(request)).encode()
    words = (sys.executable, "-m", "supernode.foreign.export")
    done = subprocess.run(words, input=asked, capture_output=True, check=False)
    try:
        told = json.loads(done.stdout or b"null")
    except ValueError:
        told = None
    if isinstance(told, dict) and told.get("error") in BY_NAME:
        raise BY_NAME[told["error"]](told["message"], hint=told["hint"])
    if done.returncode or not isinstance(told, dict):
        said = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise CheckpointError(
            f"the process that writes for torch ended with exit code {done.returncode}: {said}",
            hint="see that there is memory and room on the disk, or leave out `--format dcp`.",
        )

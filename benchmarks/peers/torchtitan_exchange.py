"""One rank of torchtitan that writes a checkpoint or begins from one, and notes the loss of each step as it logs it.

The second argument is JSON: `load`, a checkpoint to begin from or empty; `save_every`, steps between checkpoints or 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torchtitan_ddp as peer  # It gives torchtitan its answers about the accelerator, and must be imported first.
from torch import Tensor
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE
from torchtitan.trainer import Trainer

TOLD = json.loads(sys.argv[2])


class OneBatch(peer.WindowLoader):
    """All windows in one batch, again and again: their order is of no account."""

    @dataclass(kw_only=True, slots=True)
    class Config(peer.WindowLoader.Config):
        """Nothing to choose."""

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            yield from super().__iter__()


def model() -> Any:
    """Return the peer's model with grouped keys and the base of our rotary frequencies."""
    shape, spec = peer.ORDERS.shape, peer.model()
    layers = llama3._build_llama3_layers(
        fuse_qkv=True, n_layers=shape["layers"], dim=shape["width"], n_heads=shape["heads"],
        n_kv_heads=shape["kv_heads"] or None, hidden_dim=peer.ORDERS.inner, attn_backend="flex",
        rope=ComplexRoPE.Config(
            dim=shape["width"] // shape["heads"], max_seq_len=peer.ORDERS.sequence, theta=shape["rope_base"]
        ),
    )  # fmt: skip
    return replace(spec, model=replace(spec.model, layers=layers))


def main() -> None:
    """Train for as many steps as ordered."""
    peer.titan_attention.FlexAttention.forward = peer.fused_attention
    answer = Path(peer.ORDERS.answer)
    losses: list[float] = []
    log = MetricsProcessor.log

    def noted(self: Any, step: int, loss: float, *others: Any, **more: Any) -> None:
        losses.append(float(loss))
        (answer / "losses.json").write_text(json.dumps(losses))
        log(self, step, loss, *others, **more)

    MetricsProcessor.log = noted
    trainer = Trainer.Config(
        model_spec=model(),
        loss=CrossEntropyLoss.Config(global_vocab_size=peer.ORDERS.shape["vocabulary"]),
        tokenizer=peer.NoTokenizer.Config(),
        dataloader=OneBatch.Config(),
        optimizer=default_adamw(lr=peer.ORDERS.learning_rate),
        metrics=MetricsProcessor.Config(log_freq=1),
        training=TrainingConfig(
            local_batch_size=peer.ORDERS.batch, seq_len=peer.ORDERS.sequence, steps=peer.ORDERS.steps, max_norm=1.0,
            mixed_precision_param="float32", disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=1, data_parallel_shard_degree=1, spmd_backend="partial_dtensor"
        ),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=TOLD["save_every"] or 10**6, initial_load_path=TOLD["load"] or None,
            load_only=not TOLD["save_every"],
        ),
        activation_checkpoint=None,
        comm=CommConfig(train_timeout_seconds=300),
        debug=DebugConfig(enable_structured_logging=False),
        dump_folder=peer.ORDERS.answer,
    ).build()  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()

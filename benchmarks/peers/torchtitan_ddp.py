"""A rank of torchtitan: its own Llama 3 in the same shape under its own Trainer, on replicas, on CPU and gloo.

Torchtitan asks for an accelerator in a few places. They are given CPU answers here, and attention goes to the fused CPU
kernel, since FlexAttention has no backward pass on CPU; its model, trainer, metrics and optimizer run as published.
"""

from __future__ import annotations

import resource
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_collectives as fsdp_collectives
from orders import Clock, Windows, take
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler


def stand_in_for_the_accelerator() -> None:
    """Answer torchtitan's questions about the device; must run before it is imported."""
    device = types.ModuleType("cpu_device")
    for name in dir(torch.cpu):
        setattr(device, name, getattr(torch.cpu, name))
    device.set_device = lambda index: None
    device.current_device = lambda: 0
    device.device_count = lambda: 1
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(device, name, lambda *a: None)
    device.get_device_name = lambda index=None: "cpu"
    device.get_device_properties = lambda index=None: types.SimpleNamespace(
        total_memory=24 << 30, name="cpu", multi_processor_count=2
    )
    device.memory_stats = lambda index=None: {
        "active_bytes.all.peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "reserved_bytes.all.peak": 0,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: device
    if not hasattr(dist, "set_timeout"):  # torch 2.13 lacks it
        dist.set_timeout = lambda *a, **k: None
    barrier = dist.barrier
    dist.barrier = lambda *a, device_ids=None, **k: barrier(*a, **k)
    # Its expert-parallel kernels want triton when they are imported; a dense model never calls them.
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()
    factors = fsdp_collectives._get_gradient_divide_factors  # gloo has no PREMUL_SUM, so sums are asked for
    fsdp_collectives._get_gradient_divide_factors = lambda *a, **k: factors(*a[:5], force_sum_reduction_for_comms=True)


stand_in_for_the_accelerator()

import torchtitan.models.common.attention as titan_attention  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

ORDERS = take()
CLOCK = Clock(ORDERS, "torchtitan")


def fused_attention(
    self: object, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: object = None,
    scale: float | None = None, enable_gqa: bool = False, **others: object,
) -> Tensor:  # fmt: skip
    """Return causal attention over whole windows; torchtitan reads the arguments' names, so they are its own."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa).transpose(1, 2)


class WindowLoader(BaseDataLoader):
    """The windows that every peer reads, as torchtitan wants them."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to choose."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **others: Any
    ) -> None:
        windows = Windows(ORDERS)
        sampler: DistributedSampler[Any] = DistributedSampler(windows, num_replicas=dp_world_size, rank=dp_rank)
        self.loader = DataLoader(windows, batch_size=local_batch_size, sampler=sampler, drop_last=True)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for inputs, targets in self.loader:
            yield {"input": inputs}, targets

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the run is not resumed."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing."""


class NoTokenizer(BaseTokenizer):
    """The data is tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, **others: Any) -> None:
        super().__init__()

    def encode(self, *words: Any, **others: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *words: Any, **others: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return int(ORDERS.shape["vocabulary"])


def model() -> ModelSpec:
    """Return torchtitan's Llama 3 in the shape of the orders; its layers as its own flavours build them."""
    shape = ORDERS.shape
    width, heads, vocabulary = shape["width"], shape["heads"], shape["vocabulary"]
    config = llama3.Llama3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=width, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=width, out_features=vocabulary, param_init=llama3._output_linear_init(width)
        ),
        layers=llama3._build_llama3_layers(
            fuse_qkv=True, n_layers=shape["layers"], dim=width, n_heads=heads, hidden_dim=ORDERS.inner,
            rope=ComplexRoPE.Config(dim=width // heads, max_seq_len=ORDERS.sequence), attn_backend="flex",
        ),
    )  # fmt: skip
    return ModelSpec(
        name="llama3", flavor="benchmark", model=config, parallelize_fn=llama3.parallelize_llama, pipelining_fn=None,
        post_optimizer_build_fn=None, state_dict_adapter=None,
    )  # fmt: skip


def main() -> None:
    """Train until the benchmark has seen enough."""
    titan_attention.FlexAttention.forward = fused_attention
    train_step = Trainer.train_step

    def timed(self: Trainer, batches: Iterator[Any]) -> None:
        train_step(self, batches)
        CLOCK.step_ended()

    Trainer.train_step = timed
    trainer = Trainer.Config(
        model_spec=model(),
        loss=CrossEntropyLoss.Config(global_vocab_size=ORDERS.shape["vocabulary"]),
        tokenizer=NoTokenizer.Config(),
        dataloader=WindowLoader.Config(),
        optimizer=default_adamw(lr=ORDERS.learning_rate),
        training=TrainingConfig(
            local_batch_size=ORDERS.batch, seq_len=ORDERS.sequence, steps=ORDERS.steps, max_norm=1.0,
            mixed_precision_param="float32", disable_cuda_graphs=True,
        ),
        # Its default backend wants a newer torch than the 2.13 that all run here.
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=2, data_parallel_shard_degree=1, spmd_backend="partial_dtensor"
        ),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        comm=CommConfig(train_timeout_seconds=1800),  # The benchmark stops ranks for longer than its usual 100 s.
        debug=DebugConfig(enable_structured_logging=False),
        dump_folder=ORDERS.answer,
    ).build()  # fmt: skip
    parameters = sum(p.numel() for part in trainer.model_parts for p in part.parameters())
    assert parameters == ORDERS.parameters, f"{parameters} parameters are not the {ORDERS.parameters} of the others"
    trainer.train()


if __name__ == "__main__":
    main()

"""A rank of plain PyTorch: the same decoder under DistributedDataParallel, in the loop that its tutorials teach."""

from __future__ import annotations

import torch
import torch.distributed as dist
from orders import Clock, Windows, take
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train until the benchmark has seen enough."""
    orders = take()
    from supernode.models.decoder import Decoder
    from supernode.schema.model import DecoderShape

    dist.init_process_group("gloo")
    decoder = Decoder(DecoderShape(**orders.shape))
    for name, parameter in decoder.named_parameters():
        decoder.initialise(name, parameter.data, torch.Generator().manual_seed(0))
    model = DistributedDataParallel(decoder, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=orders.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    windows = Windows(orders)
    loader = DataLoader(windows, batch_size=orders.batch, sampler=DistributedSampler(windows), drop_last=True)
    batches, clock = iter(loader), Clock(orders, "torch")
    for _ in range(orders.steps):
        inputs, targets = next(batches)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # as a loop that shows its loss would
        clock.step_ended()


if __name__ == "__main__":
    main()

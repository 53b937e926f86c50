"""A rank of Hugging Face accelerate: the same decoder, prepared and stepped as its guide shows, on its DDP."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from orders import Clock, Windows, take
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main() -> None:
    """Train until the benchmark has seen enough."""
    orders = take()
    from supernode.models.decoder import Decoder
    from supernode.schema.model import DecoderShape

    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp])
    torch.set_num_threads(1)  # Accelerate shares the cores out by itself.
    decoder = Decoder(DecoderShape(**orders.shape))
    for name, parameter in decoder.named_parameters():
        decoder.initialise(name, parameter.data, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(
        decoder.parameters(), lr=orders.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    loader = DataLoader(Windows(orders), batch_size=orders.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(decoder, optimizer, loader)
    assert accelerator.num_processes == 2
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    batches, clock = iter(loader), Clock(orders, "accelerate")
    for _ in range(orders.steps):
        inputs, targets = next(batches)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # as a loop that shows its loss would
        clock.step_ended()


if __name__ == "__main__":
    main()

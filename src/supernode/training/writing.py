"""Text that a trained model writes: one process, the whole model, one token after another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from supernode.checkpoint.source import Source
from supernode.data.corpus import Corpus, decode, encode
from supernode.models.decoder import Decoder
from supernode.parallel.assemble import assemble
from supernode.parallel.chance import seed_for
from supernode.schema.plan import Plan
from supernode.training.saving import load_weights


@torch.no_grad()
def write_sample(plan: Plan, corpus: Corpus, source: Source, *, beat: Callable[[], None] = lambda: None) -> str:
    """Return the prompt and what the model of a checkpoint makes of it.

    Each new token is drawn from the whole sequence so far, cut to the length that the model was trained on.

    Args:
        beat: called every few tokens, as a sign of life.
    """
    parts = assemble(plan, None)
    load_weights(parts, source)
    model = parts.modules[0].eval()
    assert isinstance(model, Decoder)
    wanted, sequence = plan.job.sample, plan.job.data.sequence
    generator = torch.Generator().manual_seed(seed_for(plan.job.seed, "sample"))
    tokens = encode(corpus, wanted.prompt) or [0]
    for count in range(wanted.tokens):
        if count % 16 == 0:
            beat()
        logits_V = model(torch.tensor([tokens[-sequence:]]))[0, -1].float()
        if wanted.temperature == 0:
            tokens.append(int(logits_V.argmax()))
        else:
            chances_V = (logits_V / wanted.temperature).softmax(-1)
            tokens.append(int(torch.multinomial(chances_V, 1, generator=generator)))
    return decode(corpus, tokens)

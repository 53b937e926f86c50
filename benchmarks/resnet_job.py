"""What a user would bring to train a residual network: a model and a data set, named by a job as `file.py:function`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from supernode.models.resnet import ResNet

WIDTH, PIXELS, CLASSES = 32, 64, 100
SAMPLES = 4096


def model() -> nn.Module:
    """Return ResNet-152 of half the published width."""
    return ResNet(width=WIDTH, classes=CLASSES)


class Images:
    """Noise of the right shape: a step's time does not depend on what the images show."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, PIXELS, PIXELS, generator=generator), torch.tensor(index % CLASSES)


def images() -> Images:
    """Return the data set."""
    return Images()

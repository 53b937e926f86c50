"""An ordinary PyTorch file: a classifier of small images and its data. Nothing in it knows of supernode."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CLASSES = 10
SIDE = 8


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Noisy, shifted pictures of ten shapes; sample `index` of a seed is always the same."""

    def __init__(self, count: int, *, seed: int) -> None:
        self.count = count
        self.seed = seed
        coarse = torch.rand(CLASSES, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        self.shapes = nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = torch.randint(CLASSES, (), generator=generator)
        down, right = torch.randint(-1, 2, (2,), generator=generator).tolist()
        noise = 0.3 * torch.randn(1, SIDE, SIDE, generator=generator)
        return self.shapes[label].roll((down, right), dims=(1, 2)) + noise, label


class Classifier(nn.Module):
    """Two convolutions and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.head = nn.Linear(width * (SIDE // 2) ** 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit for each class; (samples, classes)."""
        hidden = torch.relu(self.first(images))
        hidden = torch.relu(self.second(hidden))
        logits: Tensor = self.head(hidden.flatten(1))
        return logits


def build() -> nn.Module:
    """Return a new classifier."""
    return Classifier()


def training_digits() -> Dataset[tuple[Tensor, Tensor]]:
    """Return the samples to train on."""
    return Digits(2048, seed=1)


def held_out_digits() -> Dataset[tuple[Tensor, Tensor]]:
    """Return the samples to evaluate on."""
    return Digits(512, seed=2)

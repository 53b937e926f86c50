"""A residual network of bottlenecks for images, ResNet-152 unless told otherwise; it does not know it is parallel.

Dims: B batch, C channels, H height, W width, V classes.

Source: He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385; the stride sits in the 3×3
convolution, as in torchvision's models.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

EXPANSION = 4
"""Channels that leave a bottleneck over those inside it."""
RESNET_152 = (3, 8, 36, 3)
"""Bottlenecks of each stage (He et al., table 1)."""


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut; (B, C, H, W) to (B, 4·width, H/stride, W/stride)."""

    def __init__(self, channels: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, EXPANSION * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(EXPANSION * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride > 1 or channels != EXPANSION * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, EXPANSION * width, 1, stride=stride, bias=False), nn.BatchNorm2d(EXPANSION * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + short)


class ResNet(nn.Module):
    """Images (B, 3, H, W) to logits (B, V). Parameters have torchvision's names.

    Args:
        depths: bottlenecks of each stage; each but the first halves height and width and doubles the channels.
        width: channels inside the first stage's bottlenecks; 64 in the published networks.
        classes: V.
    """

    def __init__(self, depths: Sequence[int] = RESNET_152, *, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels, inner = width, width
        self.stages = len(depths)
        for number, depth in enumerate(depths, 1):
            blocks = []
            for block in range(depth):
                stride = 2 if number > 1 and block == 0 else 1
                blocks.append(Bottleneck(channels, inner, stride=stride))
                channels = EXPANSION * inner
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
            inner *= 2
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in range(1, self.stages + 1):
            x = self.get_submodule(f"layer{number}")(x)
        return self.fc(self.avgpool(x).flatten(1))

"""What does a ResNet ask of a card? Its convolutions as matrix products, for arrays of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from supernode.errors import SpecError
from supernode.workload.shape import Numbers
from supernode.workload.sublayers import Demand

# He et al., arXiv:1512.03385, table 1: bottleneck blocks in each of the four stages.
RESNETS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
CLASSES = 1000
# Convolution, normalisation and activation of each: about three kernels.
KERNELS_PER_CONVOLUTION = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One convolution with its normalisation.

    Attributes:
        inputs: channels.
        outputs: channels.
        kernel: width of the square window.
        side: width of the square output.
    """

    inputs: int
    outputs: int
    kernel: int
    side: int

    @property
    def depth(self) -> int:
        """Elements that one output is summed over."""
        return self.inputs * self.kernel**2

    @property
    def parameters(self) -> int:
        """Window and the normalisation's scale and shift."""
        return self.depth * self.outputs + 2 * self.outputs


def resnet(depth: int, *, image: int = 224) -> tuple[Convolution, ...]:
    """Return the convolutions of a ResNet with bottleneck blocks; the stride is in the 3×3 one, as in torchvision.

    Args:
        depth: 50, 101 or 152.
        image: width of the square picture.

    Raises:
        SpecError: another depth.
    """
    if depth not in RESNETS:
        raise SpecError(f"ResNet of depth {depth}", hint=f"choose one of {', '.join(map(str, RESNETS))}.")
    side, inputs = image // 4, 64
    found = [Convolution(inputs=3, outputs=64, kernel=7, side=image // 2)]
    for stage, blocks in enumerate(RESNETS[depth]):
        width = 64 * 2**stage
        for block in range(blocks):
            before, side = side, side // 2 if stage and not block else side
            found += [
                Convolution(inputs=inputs, outputs=width, kernel=1, side=before),
                Convolution(inputs=width, outputs=width, kernel=3, side=side),
                Convolution(inputs=width, outputs=4 * width, kernel=1, side=side),
            ]
            if not block:
                found.append(Convolution(inputs=inputs, outputs=4 * width, kernel=1, side=side))
            inputs = 4 * width
    return tuple(found)


def resnet_parameters(layers: tuple[Convolution, ...]) -> int:
    """Return the parameters, classifier included."""
    return sum(layer.parameters for layer in layers) + (layers[-1].outputs + 1) * CLASSES


def resnet_demand(layers: Sequence[Convolution], pictures: Numbers, *, classes: int = CLASSES) -> Demand:
    """Return what one forward of so many pictures takes on one card; time it with `pass_times`.

    Normalisation reads its input twice and writes once, activation reads and writes; residual sums are a third of them.

    Args:
        classes: of the classifier behind the layers; 0 for layers that none follows.
    """
    products = operands = traffic = np.zeros(())
    for layer in layers:
        rows = pictures * layer.side**2
        products = products + 2 * rows * layer.depth * layer.outputs
        operands = operands + rows * (layer.inputs + layer.outputs) + layer.depth * layer.outputs
        traffic = traffic + rows * layer.outputs * 6 * 2
    products = products + 2 * pictures * layers[-1].outputs * classes
    none = np.zeros(())
    return Demand(
        products=products, operands=operands, inputs=none, scores=none, traffic=traffic,
        kernels=KERNELS_PER_CONVOLUTION * len(layers), score_traffic=none,
    )  # fmt: skip

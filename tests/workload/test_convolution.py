"""ResNets against their published sizes."""

from __future__ import annotations

import numpy as np
import pytest

from supernode.errors import SpecError
from supernode.forecast.efficiency import card_model
from supernode.forecast.kernels import pass_times
from supernode.workload.convolution import resnet, resnet_demand, resnet_parameters
from supernode.workload.strategy import Software, make_strategies


# torchvision's model cards: parameters, and multiply-adds of one picture of 224 × 224.
@pytest.mark.parametrize(
    ("depth", "parameters", "multiply_adds"),
    [(50, 25_557_032, 4.09e9), (101, 44_549_160, 7.80e9), (152, 60_192_808, 11.51e9)],
)
def test_sizes_are_the_published_ones(depth: int, parameters: int, multiply_adds: float) -> None:
    layers = resnet(depth)

    assert resnet_parameters(layers) == parameters
    assert float(resnet_demand(layers, np.asarray(1.0)).products) / 2 == pytest.approx(multiply_adds, rel=0.01)


def test_other_depths_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match="18"):
        resnet(18)


def test_training_resnet_50_on_an_a100_is_bound_by_memory_as_published() -> None:
    # NVIDIA's DeepLearningExamples report 2,500 to 3,000 pictures a second on one A100 in mixed precision (from memory,
    # hence the wide tolerance): a fifth of what its products alone would allow.
    card, ways = card_model("A100-80"), make_strategies()
    found = pass_times(resnet_demand(resnet(50), np.asarray(256.0)), ways, card, Software())

    assert 256 / float(found.total) == pytest.approx(2750, rel=0.35)


def test_the_parts_of_a_network_ask_what_the_whole_does() -> None:
    layers = resnet(50)
    whole = resnet_demand(layers, 8.0)
    parts = [resnet_demand(layers[:20], 8.0, classes=0), resnet_demand(layers[20:], 8.0)]

    assert sum(float(part.products) for part in parts) == pytest.approx(float(whole.products))
    assert sum(float(part.traffic) for part in parts) == pytest.approx(float(whole.traffic))

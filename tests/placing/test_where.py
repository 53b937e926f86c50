"""Are the cards of a plan's groups those that its order of axes says?"""

from __future__ import annotations

import numpy as np
import pytest

from supernode.forecast.rates import card_of
from supernode.hardware.assemble import build_machine, predefined
from supernode.placing.torus import TorusPlaces
from supernode.placing.where import Where, ranks_in, where
from supernode.workload.presets import public_model
from supernode.workload.strategy import Software, make_strategies

MODEL = public_model("llama3-70b")


def lies(name: str, **degrees: float) -> Where:
    machine = predefined(name)
    ways = make_strategies(**{"batch": 256, "sequence": 8192, "sharding": 1, "sequence_parallel": 1, **degrees})
    return where(MODEL, ways, card_of(machine), Software(), machine)


def test_ranks_lie_by_the_strides_of_their_axes() -> None:
    ways = make_strategies(tensor=2, data=3, pipeline=2, batch=12, sequence=128)

    # By hand: data innermost, then pipeline, then tensor; ranks count tensor first, then data, then pipeline.
    cards = ranks_in(("data", "pipeline", "tensor", "context"), ways)
    assert cards.tolist() == [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]
    assert ranks_in(("tensor", "context", "data", "pipeline"), ways).tolist() == list(range(12))


def test_on_nodes_of_eight_tensor_groups_are_nodes() -> None:
    found = lies("64xH100", tensor=8, data=8)

    assert (found.order, found.is_torus) == (("tensor", "data"), False)
    assert found.groups.tolist() == np.arange(64).reshape(8, 8).tolist()
    assert found.saved == 0


def test_on_a_torus_tensor_groups_are_blocks_of_neighbours() -> None:
    found = lies("supernode-512", tensor=8, pipeline=4, data=16)

    assert found.order == ("tensor 2 < data 4", "tensor 2 < data 4", "tensor 2 < pipeline 4")
    assert sorted(found.cards.tolist()) == list(range(512))
    # 2 × 2 × 2 of a torus of 8 × 8 × 8, numbered row-major.
    assert sorted(found.groups[0].tolist()) == [0, 1, 8, 9, 64, 65, 72, 73]
    for group in found.groups:
        places = np.stack(np.unravel_index(group, (8, 8, 8)), axis=1)
        assert (places.max(axis=0) - places.min(axis=0)).tolist() == [1, 1, 1]
    machine = predefined("supernode-512")
    ways = make_strategies(
        tensor=8, pipeline=4, data=16, batch=256, sequence=8192, sharding=1, sequence_parallel=1
    )  # fmt: skip
    places_of = TorusPlaces(MODEL, ways, card_of(machine), Software(), machine)
    assert found.saved == pytest.approx(1 - places_of.best().time / places_of.in_rank_order().time)


def test_degrees_that_do_not_lie_along_a_torus_lie_in_order() -> None:
    machine = build_machine(8, "3D_Torus", card="H100")
    ways = make_strategies(tensor=2, data=3, batch=12, sequence=8192)
    found = where(MODEL, ways, card_of(machine), Software(), machine)

    assert not found.is_torus
    assert sorted(found.cards.tolist()) == list(range(6))

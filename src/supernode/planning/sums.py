"""What should summing a plan's gradients over its copies take, by algorithm and size? For ranks to begin from."""

from __future__ import annotations

from dataclasses import replace

from supernode.fabric.choice import table
from supernode.fabric.level import levels_of
from supernode.hardware.machine import Machine
from supernode.schema.plan import Layout, SumTable

SIZES = tuple(float(2**power) for power in range(16, 28, 2))


def sum_table(layout: Layout, machine: Machine) -> SumTable | None:
    """Return the table of an all-reduce over the copies; None where there is one, or all lie within a node.

    Copies are taken to lie as ranks do: a node's first, as many as have room beside their tensor axis.
    """
    inner = machine.tiers[0].cards
    inside = max(1, min(layout.copies, inner // layout.tensor))
    outside = -(-layout.copies // inside)
    levels = levels_of(machine)
    if outside == 1 or len(levels) < 2:
        return None
    parts = [replace(levels[0], size=inside)] if inside > 1 else []
    found = table("all_reduce", [*parts, replace(levels[1], size=outside)], SIZES)
    return SumTable(
        sizes=SIZES,
        times={name: tuple(map(float, row)) for name, row in zip(found.algorithms, found.times, strict=True)},
    )

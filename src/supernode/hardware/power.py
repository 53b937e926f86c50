"""How many watts does a machine take, from the chips out to the wall and the pumps?"""

from __future__ import annotations

from dataclasses import dataclass

from supernode.errors import SpecError
from supernode.hardware.machine import Machine
from supernode.hardware.parts import Card, Node, Switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Watts of a machine at one load.

    Attributes:
        it: what cards, nodes, switches and cables take.
        supply_losses: what the power supplies turn into heat.
        cooling: pumps, fans and chillers.
    """

    it: float
    supply_losses: float
    cooling: float

    @property
    def heat(self) -> float:
        """Watts that the cooling has to carry away."""
        return self.it + self.supply_losses

    @property
    def total(self) -> float:
        """Watts from the grid."""
        return self.heat + self.cooling

    @property
    def pue(self) -> float:
        """Power usage effectiveness: total over what the IT equipment draws, its own supplies included."""
        return self.total / self.heat


def power(machine: Machine, *, load: float = 1.0) -> Power:
    """Return the watts of a machine, linear between rest and full load.

    Args:
        load: 0 at rest, 1 with every card at its full power.

    Raises:
        SpecError: `load` is outside 0 to 1.
    """
    if not 0 <= load <= 1:
        raise SpecError(f"`load` is {load}", hint="choose 0 (at rest) to 1 (full).")
    nodes = [(machine.node, machine.hosts)] if machine.node else []
    parts: list[tuple[Card | Node | Switch, int]] = [(machine.card, machine.card_count), *nodes, *machine.switches]
    it = sum(count * (part.idle_power + load * (part.power - part.idle_power)) for part, count in parts)
    it += sum(cable.power * count for cable, count in machine.cables)
    losses = it / machine.supply.efficiency - it
    return Power(it=it, supply_losses=losses, cooling=(it + losses) * machine.cooling.overhead)

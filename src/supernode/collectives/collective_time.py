"""How long does a collective take among cards of a measured generation? Bands of protocols, for arrays at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from supernode.collectives.transport import Band, InSwitch, Path, Transport, Width, transport
from supernode.errors import SpecError
from supernode.registry import lookup

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "send_recv": "send_recv",
}
"""Collectives, and the names that measurements give them."""

# A step lasts as long as the longer of its least time and its transfer, the corner between the two rounded: fitted on
# the fitting rows of NVLink 5, where 2 to 5 differ by less than 0.1% of the mean error.
CORNER = 3.0


def collective_seconds(
    kind: str,
    nbytes: ArrayLike,
    cards: ArrayLike,
    *,
    system: str | Transport,
    node_cards: ArrayLike | None = None,
    library: str | None = None,
) -> Floats:
    """Return the seconds of a collective, launch included, for each pair of size and group that broadcast together.

    A ring takes n − 1 steps (all-reduce twice that), each with 1/n of the bytes; an all-to-all sends n − 1 messages of
    1/n at once; both copy the card's own share. Bands (LL, LL128, Simple) differ in latency, least time of a step and
    bandwidth; short messages use the fastest short band, and the library goes to the long one where its own estimate
    says so, which is not always where it is faster: times jump there, and never fall with size. Switches that add
    take over all-reduces where they are faster for long transfers.

    Args:
        kind: one of `KINDS`.
        nbytes: nccl-tests' size: a card's buffer (all_reduce, reduce_scatter, all_to_all), the gathered result
            (all_gather), the message (send_recv).
        cards: in the group; outside those measured (2 to 8, one NVLink domain) the steps extrapolate.
        system: a machine or generation of `catalog/collectives.yaml`, or a transport of your own.
        node_cards: cards of the group within one node; all, unless said.
        library: version of the collective library; the newest measured, unless said.

    Raises:
        SpecError: unknown kind or system, no card, negative bytes, or a group across nodes where none was measured.

    Source: Patarasuk and Yuan, JPDC 69, 2009 (rings); NVIDIA NCCL 2.27, src/graph/tuning.cc (bands, estimates).

    >>> float(collective_seconds("all_reduce", 2**30, 1, system="h100_sxm"))
    0.0
    """
    import numpy as np

    form = lookup(KINDS.get(kind, kind), {name: name for name in KINDS.values()}, kind="collective")
    by = transport(system, library=library) if isinstance(system, str) else system.of(library)
    size, group = np.broadcast_arrays(np.asarray(nbytes, float), np.asarray(cards, float))
    if (size < 0).any() or (group < 1).any():
        raise SpecError("a collective of no cards or negative bytes", hint="give `nbytes` >= 0 and `cards` >= 1.")
    inside = np.minimum(group if node_cards is None else np.asarray(node_cards, float), group)
    alone = group == 1
    group = np.where(alone, 2.0, group)
    seconds = _inside(form, size, group, by)
    crosses = inside < group - alone
    if crosses.any():
        seconds = np.where(crosses, _across(form, size, group, np.maximum(inside, 1.0), by), seconds)
    result: Floats = np.where(alone, 0.0, seconds)
    return result


def _inside(form: str, size: Floats, group: Floats, by: Transport) -> Floats:
    """Return the seconds within one node or NVLink domain."""
    import numpy as np

    if form == "send_recv":
        return by.launch + _path(by.exchange, np.ones_like(size), size, group, by, own=np.zeros_like(size))
    share = size / group
    if form == "all_to_all":
        return by.launch + _path(by.exchange, group - 1, share, group, by, own=share)
    rounds = 2.0 if form == "all_reduce" else 1.0
    ring = _path(by.ring, rounds * (group - 1), share, group, by, own=share)
    if form == "all_reduce" and by.in_switch is not None:
        wins = _switch_wins(by.in_switch, by.ring, group)
        ring = np.where(wins, _added(by.in_switch, share, group, by), ring)
    return by.launch + ring


def _across(form: str, size: Floats, group: Floats, inside: Floats, by: Transport) -> Floats:
    """Return the seconds over several nodes: launch and short steps within, and the node's edge as the slow ring."""
    import numpy as np

    path = by.network_exchange if form in ("send_recv", "all_to_all") else by.network
    if path is None:
        raise SpecError(
            f"no {form} across nodes was measured for {', '.join(by.systems)}",
            hint="keep the group within a node (`node_cards`), or fit a transport with `network`.",
        )
    nothing = np.zeros_like(size)
    nodes = np.maximum(np.ceil(group / inside), 2.0)
    if form == "send_recv":
        return by.launch + _path(path, np.ones_like(size), size, group, by, own=nothing)
    if form == "all_to_all":
        share = size / group
        return by.launch + _path(path, nodes - 1, share * inside, group, by, own=share)
    rounds = 2.0 if form == "all_reduce" else 1.0
    steps = rounds * (nodes - 1)
    within = _fastest(by.ring.short, rounds * (inside - 1), nothing, group, by.widths) * (inside > 1)
    return by.launch + within + _path(path, steps, rounds * (group - 1) / group * size / steps, group, by, own=nothing)


def _path(path: Path, steps: Floats, message: Floats, group: Floats, by: Transport, *, own: Floats) -> Floats:
    """Return the seconds of a path's steps in the band that the library takes, beyond the launch."""
    import numpy as np

    short = _fastest(path.short, steps, message, group, by.widths)
    long = _band(path.long, steps, message, group, by.widths)
    if by.patient:
        return np.minimum(short, long) + own / path.copy
    switch = path.switch + path.switch_first / steps
    # Where the library leaves the short band late, the long one is no faster than the short one was at the switch.
    last = _fastest(path.short, steps, switch, group, by.widths)
    return np.where(message >= switch, np.maximum(long, last), short) + own / path.copy


def _fastest(
    bands: tuple[Band, ...], steps: Floats, message: Floats, group: Floats, widths: tuple[Width, ...]
) -> Floats:
    from functools import reduce

    import numpy as np

    return reduce(np.minimum, (_band(band, steps, message, group, widths) for band in bands))


def _band(band: Band, steps: Floats, message: Floats, group: Floats, widths: tuple[Width, ...]) -> Floats:
    """Return a band's seconds: its latency, the steps, and once more the bytes that fill its pipeline."""
    bandwidth, hop = band.bandwidth * _crossed(widths, group, "bandwidth"), band.hop * _crossed(widths, group, "hop")
    step: Floats = (hop**CORNER + (message / bandwidth) ** CORNER) ** (1 / CORNER)
    return band.latency + steps * step + _fill(band.fill, steps * message) / bandwidth


def _fill(fill: float, nbytes: Floats) -> Floats:
    """Return the bytes that a pipeline is short of: all of few, at most `fill` of many."""
    return nbytes * fill / (nbytes + fill) if fill else nbytes * 0.0


def _added(adder: InSwitch, share: Floats, group: Floats, by: Transport) -> Floats:
    """Return the seconds of an all-reduce whose long messages are added in the switch, beyond the launch."""
    import numpy as np

    # As in `_path`: the ring's short bands up to the switch, and never faster beyond it than at it.
    steps, last = 2 * (group - 1), np.full_like(share, adder.switch)
    short, at_switch = (
        _fastest(by.ring.short, steps, each, group, by.widths) + each / by.ring.copy for each in (share, last)
    )
    nbytes = (group + 1) * share
    adding = adder.latency + (nbytes + _fill(adder.fill, nbytes)) / adder.bandwidth
    return np.where(share < adder.switch, short, np.maximum(adding, at_switch))


def _switch_wins(by: InSwitch, ring: Path, group: Floats) -> NDArray[np.bool_]:
    """Return where adding in the switch is faster for the longest transfers."""
    # Both per byte of a card's share: the ring's two passes and its copy against one pass out and in.
    wins: NDArray[np.bool_] = (group + 1) / by.bandwidth < 2 * (group - 1) / ring.long.bandwidth + 1 / ring.copy
    return wins


def _crossed(widths: tuple[Width, ...], group: Floats, what: str) -> Floats:
    """Return the factor of the narrowest width that holds each group; the widest serves wider ones."""
    import numpy as np

    if not widths:
        return np.ones_like(group)
    factors = np.array([getattr(width, what) for width in widths])
    held = np.searchsorted([width.cards for width in widths], group)
    result: Floats = factors[np.minimum(held, len(widths) - 1)]
    return result

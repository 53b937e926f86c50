"""Which claims are there, and what does the product show for each? One row a claim, computed when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from supernode.claims import cluster, fabrics, hybrid, project, reliable, topology
from supernode.claims.claim import Claim, Entry, Setting, Show
from supernode.errors import SpecError

CLAIMS: Mapping[str, tuple[Claim, Show]] = {
    claim.id: (claim, show)
    for claim, show in (
        (
            Claim(id="S3.1", says="communication share of a 32-card step, 35% before", figure=0.12, goal="at most",
                  unit="%"),
            fabrics.communication_share,
        ),
        (
            Claim(id="S3.2", says="all-to-all faster with the hybrid fabric", figure=0.65, goal="at least", unit="%"),
            fabrics.hybrid_exchange,
        ),
        (
            Claim(id="S3.3", says="of line rate with dynamic traffic scheduling", figure=0.98, goal="at least",
                  unit="%"),
            fabrics.line_rate,
        ),
        (
            Claim(id="S3.4", says="bandwidth used over a tree's", figure=3.0, goal="at least", unit="×"),
            fabrics.over_tree,
        ),
        (
            Claim(id="S3.5", says="bandwidth at 256 cards", figure=4.0, goal="at least", unit="×"),
            fabrics.wide_supernode,
        ),
        (
            Claim(id="S6.1", says="parallel efficiency at 512 cards", figure=0.92, goal="at least", unit="%"),
            hybrid.parallel_efficiency,
        ),
        (
            Claim(id="S6.2", says="faster than pure data parallelism", figure=0.27, goal="at least", unit="%"),
            hybrid.over_data,
        ),
        (
            Claim(id="S6.3", says="hybrid parallelism over tensor and data alone", figure=1.5, goal="at least",
                  unit="×"),
            hybrid.over_two_axes,
        ),
        (
            Claim(id="S6.4", says="pipelining on long sequences", figure=1.8, goal="at least", unit="×"),
            hybrid.pipelining,
        ),
        (
            Claim(id="S9.1", says="less communication by topology-aware partition", figure=0.30, goal="at least",
                  unit="%"),
            topology.aware_partition,
        ),
        (
            Claim(id="S10.1", says="from a failure until the work that it cost is done again", figure=10.0,
                  goal="at most", unit="minutes"),
            reliable.recovery_minutes,
        ),
        (
            Claim(id="S11.1", says="between failures of a machine of 512 cards", figure=200_000.0, goal="at least",
                  unit="h"),
            reliable.outage_hours,
        ),
        (
            Claim(id="S11.2", says="of the time is lost to failures (99.995% available)", figure=0.00005,
                  goal="at most", unit="%"),
            reliable.unavailable,
        ),
        (
            Claim(id="S17.1", says="linear scaling to a million cards", figure=0.95, goal="at least", unit="%"),
            cluster.million_cards,
        ),
        (
            Claim(id="S17.2", says="a trillion parameters in weeks, not months", figure=8.0, goal="at most",
                  unit="weeks"),
            cluster.trillion_weeks,
        ),
        (
            Claim(id="S18.1", says="a trillion parameters, 45 days before", figure=19.0, goal="at most", unit="days"),
            project.days,
        ),
        (
            Claim(id="S18.2", says="1.75 T parameters over the plain distributed rate", figure=8.0, goal="at least",
                  unit="×"),
            project.mixture_rate,
        ),
    )
}  # fmt: skip


def chosen(names: Sequence[str]) -> list[str]:
    """Return the ids that names stand for: `S3.1`, or `S3` for all of a system; none for every claim.

    Raises:
        SpecError: a name stands for none.
    """
    found = []
    for name in names or CLAIMS:
        some = [known for known in CLAIMS if name.upper() in (known, known.split(".")[0])]
        if not some:
            raise SpecError(f"no claim {name!r}", hint=f"choose among {', '.join(CLAIMS)}, or a system such as S3.")
        found += [known for known in some if known not in found]
    return found


def show(
    names: Sequence[str] = (), *, setting: Setting | None = None, progress: Callable[[str], None] | None = None
) -> Iterator[Entry]:
    """Yield the rows, each computed now.

    Args:
        names: ids or systems; empty for all.
        progress: told of each claim before it is computed.

    Raises:
        SpecError: a name stands for none.
    """
    for name in chosen(names):
        claim, shown = CLAIMS[name]
        if progress is not None:
            progress(f"{name}: {claim.says}")
        yield Entry(claim=claim, shown=shown(setting or Setting()))

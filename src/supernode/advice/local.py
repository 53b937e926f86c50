"""What is `local`? This computer, with as many cards as a job's degrees take, or else as it has cores."""

from __future__ import annotations

from supernode.hardware.discover import discover, usable_cores
from supernode.hardware.machine import Machine
from supernode.schema.job import JobSpec

LOCAL = "local"


def this_computer(job: JobSpec | None = None, *, cards: int | None = None) -> Machine:
    """Return this computer.

    Args:
        job: whose degrees say how many cards; of an open data degree as many as the cores fill, each copy whole.
        cards: how many instead.
    """
    if cards is None and job is not None:
        want = job.parallelism
        least, cores = want.least, usable_cores()
        cards = least if want.data else max(least, cores - cores % least)
    return discover(cards=cards)

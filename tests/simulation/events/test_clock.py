"""Jobs end when what is left of them is through at the rates that they had."""

from __future__ import annotations

from supernode.simulation.events.clock import Clock, Job


def test_a_job_that_slows_down_halfway_takes_half_as_long_again() -> None:
    clock, ended = Clock(), {}
    job = clock.start(2.0, lambda: ended.update(slow=clock.now))
    clock.start(1.0, lambda: clock.set_rate(job, 0.5))

    clock.run()

    assert ended == {"slow": 3.0}


def test_what_begins_meanwhile_begins_at_its_moment() -> None:
    clock, ended = Clock(), []

    def first() -> None:
        ended.append(clock.now)
        clock.start(0.5, lambda: ended.append(clock.now))

    clock.start(1.0, first)
    clock.run()

    assert ended == [1.0, 1.5]


def test_a_rate_that_stays_changes_nothing() -> None:
    clock = Clock()
    job: Job = clock.start(1.0, lambda: None)

    clock.set_rate(job, 1.0)

    assert job.version == 0

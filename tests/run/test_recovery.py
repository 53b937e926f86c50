"""A run that loses ranks, cards or their good sense goes on: those who live keep their processes, and numbers hold."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supernode.control.journal import read
from supernode.control.training import status
from supernode.errors import RunError
from supernode.schema.event import Diverged, Event, Fenced, RankLost, Restored, StepDone
from supernode.schema.report import RunState

pytestmark = pytest.mark.slow


def of(kind: type[Any], folder: Path) -> list[Any]:
    """Return the events of a kind that a run's journal knows."""
    return [event for _, event in read(folder / "journal.db") if isinstance(event, kind)]


def at_step(step: int, do: Callable[[], object], *, times: int = 1) -> Callable[[Event, RunState], None]:
    """Return a watch that does something when a step is done, as often as told."""
    left = [times]

    def watch(event: Event, state: RunState) -> None:
        if isinstance(event, StepDone) and event.step >= step and left[0]:
            left[0] -= 1
            do()

    return watch


def test_twenty_losses_cost_a_healthy_rank_neither_its_process_nor_memory(workshop: Any, tmp_path: Path) -> None:
    job = workshop.job(
        {"data": 2}, steps=45, checkpoint={"every": 1000, "memory_every": 1},
        recovery={"fence_after": 0, "most_restarts": 100},
    )  # fmt: skip
    seen: list[tuple[int, int, int]] = []  # process, resident bytes and descriptors of rank 0 before each kill
    last = [0]

    def watch(event: Event, state: RunState) -> None:
        if isinstance(event, StepDone) and event.step >= last[0] + 2 and len(seen) < 20:
            last[0] = event.step
            first = workshop.server.children[0]
            pages = int(Path(f"/proc/{first}/statm").read_text().split()[1])
            seen.append((first, pages * 4096, len(list(Path(f"/proc/{first}/fd").iterdir()))))
            workshop.kill(1, signal=signal.SIGKILL)

    assert workshop.run(job, tmp_path / "run", watch=watch).outcome == "finished"

    assert len(of(RankLost, tmp_path / "run")) == 20
    assert {event.source for event in of(Restored, tmp_path / "run")[1:]} == {"memory"}
    assert len({process for process, _, _ in seen}) == 1
    assert seen[-1][1] - seen[4][1] < 4 * 2**20  # Were each launch's weights and moments kept, it were 14.
    assert seen[-1][2] - seen[4][2] < 6  # And of each, four sockets.
    assert all(same for _, same in status(tmp_path / "run").repeats)


def test_a_spare_takes_the_place_of_a_card_that_fails_twice_and_a_smaller_layout_that_of_the_next(
    workshop: Any, tmp_path: Path
) -> None:
    job = workshop.job("t2", recovery={"fence_after": 2, "spares": 1})
    kill = lambda: workshop.kill(1, signal=signal.SIGKILL)  # noqa: E731

    workshop.run(job, tmp_path / "spare", watch=at_step(3, kill, times=2))
    workshop.run(job, tmp_path / "smaller", watch=at_step(3, kill, times=4))

    (fenced,) = of(Fenced, tmp_path / "spare")
    assert fenced.plan.cards == (0, 2)
    assert fenced.card == 1
    # On a spare nothing changes but the card.
    workshop.assert_same(tmp_path / "spare", workshop.undisturbed("t2"))
    state = status(tmp_path / "smaller")
    assert (state.plan.ranks, state.fenced, state.spares) == (1, (1, 2), ())
    assert state.outcome == "finished"
    workshop.assert_close(tmp_path / "smaller", workshop.undisturbed("1"))
    assert any(incident.what == "card 2 fenced" for incident in state.incidents)


def test_a_run_that_waits_goes_on_once_the_card_computes_rightly_and_the_last_card_s_end_is_told(
    workshop: Any, tmp_path: Path
) -> None:
    waits = workshop.job("t2", recovery={"fence_after": 1, "policy": "wait", "patience": 60})
    alone = workshop.job("1", recovery={"fence_after": 1})

    workshop.run(waits, tmp_path / "waits", watch=at_step(3, lambda: workshop.kill(1, signal=signal.SIGKILL)))
    with pytest.raises(RunError, match="card 0 is not used any more") as caught:
        workshop.run(alone, tmp_path / "alone", watch=at_step(3, lambda: workshop.kill(0, signal=signal.SIGKILL)))

    workshop.assert_same(tmp_path / "waits", workshop.undisturbed("t2"))
    assert [i.what for i in status(tmp_path / "waits").incidents if i.what.startswith("card 1")] == [
        "card 1 fenced", "card 1 is back",
    ]  # fmt: skip
    assert "resume" in caught.value.hint
    workshop.resume(tmp_path / "alone")
    workshop.assert_same(tmp_path / "alone", workshop.undisturbed("1"))


def test_a_frozen_rank_is_found_within_the_time_stated(workshop: Any, tmp_path: Path) -> None:
    job = workshop.job("t2p2d2", recovery={"frozen": 1.5})
    stop = at_step(3, lambda: workshop.kill(5, signal=signal.SIGSTOP))

    workshop.run(job, tmp_path / "run", watch=stop)

    (lost,) = of(RankLost, tmp_path / "run")
    assert lost.rank == 5
    assert lost.reason == "frozen: no sign of life for 1.5 s"
    workshop.assert_same(tmp_path / "run", workshop.undisturbed("t2p2d2"))


OWN = """
import os, time, torch
from torch import nn

class Windows(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        if index == 17 and not os.path.exists({mark!r}):
            open({mark!r}, "w").close()
            time.sleep(600)
        x = torch.full((4,), index / 64)
        return x, (x[:1] * 3).sum()

def data(): return Windows()
def model(): return nn.Linear(4, 1)
def loss(output, target): return ((output[:, 0] - target) ** 2).sum()
"""


def test_of_ranks_that_hang_the_one_that_the_others_wait_for_is_named(workshop: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.format(mark=str(tmp_path / "mark")))
    job = workshop.job(
        {"data": 4}, model=f"{tmp_path}/own.py:model", gradient_accumulation=1, steps=8,
        data={"dataset": f"{tmp_path}/own.py:data", "loss": f"{tmp_path}/own.py:loss"},
        optimizer={"name": "sgd", "learning_rate": 0.01}, recovery={"silence": 3.0},
    )  # fmt: skip

    workshop.run(job, tmp_path / "run")

    (lost,) = of(RankLost, tmp_path / "run")
    others = ", ".join(str(rank) for rank in range(4) if rank != lost.rank)
    assert lost.reason.startswith(f"ranks {others} wait for it in a collective for 3 s; it is at step ")
    assert "own.py:10 __getitem__" in lost.reason
    assert workshop.steps_taken(tmp_path / "run")[-1] == 8


def test_a_bit_that_flips_on_one_of_three_copies_is_found_and_its_card_fenced(workshop: Any, tmp_path: Path) -> None:
    degrees = {"data": 3}
    shape = {"batch": 6, "gradient_accumulation": 1}
    checks = {"check_every": 2, "spares": 1}
    flipped = workshop.job(degrees, **shape, drill={"flip_step": 3, "rank": 1}, recovery=checks)

    workshop.run(workshop.job(degrees, **shape), tmp_path / "right")
    workshop.run(flipped, tmp_path / "run")

    (found,) = of(Diverged, tmp_path / "run")
    assert (found.step, found.ranks) == (4, (1,))
    (fenced,) = of(Fenced, tmp_path / "run")
    assert (fenced.card, fenced.plan.cards) == (1, (0, 3, 2))
    # Step 4 had been taken with a wrong weight; it was not saved, and taken again.
    assert [event.step for event in of(Restored, tmp_path / "run")] == [0, 2]
    workshop.assert_same(tmp_path / "run", tmp_path / "right")

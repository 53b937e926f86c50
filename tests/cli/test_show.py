"""A run goes on whether or not somebody listens to what is said of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console

from supernode.cli import show
from supernode.cli.watching import Watching
from supernode.control.supernode import SuperNode
from supernode.scheduling.state import advance
from supernode.schema.event import Noted, RankLost, Restored, Started, Unsaved


@pytest.mark.parametrize("loss", ["full", "reader gone", "closed"])
def test_who_watches_goes_quiet_once_nobody_listens(monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    read, write = os.pipe()
    os.close(read)
    if loss == "full":
        os.close(write)
        write = os.open("/dev/full", os.O_WRONLY)
    file = os.fdopen(write, "w")
    if loss == "closed":
        file.close()
    monkeypatch.setattr(show, "TALK", type(show.TALK)(file=file))
    event = Started(plan=SuperNode.discover(cards=1).plan({"parallelism": {"data": 1}}))

    with Watching(quiet=False) as watching:
        watching.place(Path("run"))
        watching.prepare("tokens", 0.5)
        watching.see(event, advance(None, event, 0.0))
    show.talk("report: run/report.html")

    if not file.closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        file.close()


def test_after_a_loss_it_is_said_and_kept_from_where_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "TALK", Console(stderr=True))
    plan = SuperNode.discover(cards=1).plan({"parallelism": {"data": 1}})
    state = advance(None, Started(plan=plan, checkpoints=((8, "step-00000008"),)), 0.0)
    state = advance(state, RankLost(rank=0, incarnation=1, reason="killed by signal 9"), 1.0)
    restored = Restored(incarnation=2, step=8, source="disk")
    state = advance(state, restored, 3.0)
    unsaved = Unsaved(step=9, reason="the disk is full", hint="free some space.")

    with Watching(quiet=False) as watching:
        watching.see(restored, state)
        watching.see(unsaved, advance(state, unsaved, 4.0))

    said = "going on from step 8 in the checkpoint on disk\nstep 9 is not saved: the disk is full; free some space.\n"
    assert capsys.readouterr().err == said
    assert [incident.what for incident in state.incidents] == ["started", "rank 0 lost", "going on"]


def test_notes_are_told_in_words_and_records_kept_for_the_journal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "TALK", Console(stderr=True))
    plan = SuperNode.discover(cards=1).plan({"parallelism": {"data": 1}})
    state = advance(None, Started(plan=plan), 0.0)

    with Watching(quiet=False) as watching:
        watching.see(Noted(name="bigram_loss", value=2.319720145369293), state)
        watching.see(Noted(name="ways", value={"data": {"taken": "flat"}}), state)
        watching.see(Noted(name="how gradients meet", value="way\nflat"), state)

    told = capsys.readouterr().err.splitlines()
    assert told == ["a bigram model of the same text: held-out loss 2.3197", "how gradients meet:", "way", "flat"]

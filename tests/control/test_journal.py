"""A journal gives back what was appended, to any reader at any time, and refuses what is none."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from supernode.control.journal import Journal, read
from supernode.errors import RunError
from supernode.schema.event import Event, RankLost, StepDone, StopAsked


def step(number: int, loss: float = 1.5) -> StepDone:
    return StepDone(
        step=number, incarnation=1, loss=loss, seconds=0.5, tokens=8, norm=1.0, rate=0.1, parts={"data": 0.1}
    )


def filled(path: Path, *events: Event) -> Path:
    journal = Journal(path)
    for number, event in enumerate(events):
        journal.append(event, float(number))
    journal.close()
    return path


def test_events_come_back_in_order_with_their_times(tmp_path: Path) -> None:
    events = [step(1), step(2, loss=float("inf")), RankLost(rank=3, incarnation=1, reason="ü"), StopAsked(now=True)]

    path = filled(tmp_path / "journal.db", *events)

    assert list(read(path)) == [(float(number), event) for number, event in enumerate(events)]


def test_text_that_utf_8_cannot_hold_does_not_stop_the_run(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal.db", RankLost(rank=0, incarnation=1, reason="no file /tmp/\udcff, \ud800"))

    assert [event for _, event in read(path)] == [RankLost(rank=0, incarnation=1, reason="no file /tmp/?, ?")]


def test_a_reader_sees_what_a_living_writer_has_appended(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    journal.append(step(1), 1.0)

    seen = list(read(journal.path))
    journal.append(step(2), 2.0)
    then = list(read(journal.path))
    journal.close()

    assert (seen, then) == ([(1.0, step(1))], [(1.0, step(1)), (2.0, step(2))])


def test_a_closed_journal_is_one_file_and_reading_it_leaves_no_other(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal.db", step(1))

    list(read(path))

    assert [entry.name for entry in tmp_path.iterdir()] == ["journal.db"]


def test_a_journal_is_taken_up_again(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal.db", step(1))

    filled(path, step(2))

    assert [event for _, event in read(path)] == [step(1), step(2)]


def altered(statement: str) -> Callable[[Path], None]:
    def alter(path: Path) -> None:
        with sqlite3.connect(path) as connection:
            connection.execute(statement)
        connection.close()

    return alter


DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("zeros", lambda path: path.write_bytes(bytes(8192))),
    ("text", lambda path: path.write_text("hello\n" * 100)),
    ("cut short", lambda path: path.write_bytes(path.read_bytes()[:3000])),
    ("bytes in the middle", lambda path: path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 4096)),
    ("an unknown kind", altered("UPDATE events SET kind = 'Exploded'")),
    ("a record that is no JSON", altered("UPDATE events SET record = '{'")),
    ("a record of another kind", altered("UPDATE events SET kind = 'Started'")),
    ("a record of bytes", altered("UPDATE events SET record = x'ff00fe'")),
    ("a time that is text", altered("UPDATE events SET time = 'noon'")),
]


@pytest.mark.parametrize("damage", [case[1] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_what_is_no_journal_is_refused_with_a_remedy(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    path = filled(tmp_path / "journal.db", step(1))
    damage(path)

    with pytest.raises(RunError) as caught:
        list(read(path))

    assert caught.value.hint


@pytest.mark.parametrize("begin", [lambda path: path.write_bytes(b""), altered("DROP TABLE events")])
def test_a_journal_whose_writer_had_not_begun_holds_nothing(tmp_path: Path, begin: Callable[[Path], object]) -> None:
    path = filled(tmp_path / "journal.db")
    begin(path)

    assert list(read(path)) == []


def test_a_journal_cannot_be_opened_on_garbage(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_text("garbage" * 1000)

    with pytest.raises(RunError, match=r"journal\.db"):
        Journal(path)

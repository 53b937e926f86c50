"""The record of a run: every event with its time, appended before it is acted on, kept in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from supernode.errors import MachineError, RunError
from supernode.schema.codec import from_json, to_json
from supernode.schema.event import KINDS, Event

_TABLE = """
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, record TEXT NOT NULL)
"""


class Journal:
    """An append-only list of events in a file; one process writes it, any number read it meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Each append commits by itself; write-ahead logging lets readers in and survives the writer's death.
            self._connection = sqlite3.connect(path, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute(_TABLE)
        except sqlite3.OperationalError as error:
            raise self._unwritable(error) from error
        except sqlite3.Error as error:
            raise _unusable(path, error) from error

    def append(self, event: Event, time: float) -> None:
        """Add an event that happened at `time`, in seconds since the epoch.

        Raises:
            MachineError: the disk is full or the file cannot be written.
        """
        try:
            self._connection.execute(
                "INSERT INTO events (time, kind, record) VALUES (?, ?, ?)", (time, type(event).__name__, to_json(event))
            )
        except sqlite3.Error as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: Exception) -> MachineError:
        return MachineError(
            f"the journal {self.path} cannot be written: {error}",
            hint="free some space on its disk, then `supernode resume`.",
        )

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()


def read(path: Path) -> Iterator[tuple[float, Event]]:
    """Yield the (time, event) pairs of a journal, oldest first, without disturbing its writer.

    Raises:
        RunError: the file is no journal, or holds what this version does not know.
    """
    try:
        try:
            rows = _rows(path)
        except sqlite3.OperationalError:
            rows = _rows(path)  # Its writer began or ended the write-ahead log between our look and our opening.
    except sqlite3.Error as error:
        raise _unusable(path, error) from error
    for time, kind, record in rows:
        if not isinstance(time, float):
            raise _unusable(path, ValueError(f"an event has the time {time!r}"))
        if kind not in KINDS:
            raise RunError(
                f"{path} holds an event `{kind}` that this version does not know",
                hint="use the version of supernode that wrote the run.",
            )
        yield time, from_json(KINDS[kind], record)


def _rows(path: Path) -> list[tuple[float, str, str]]:
    # Without a write-ahead log nobody writes, and a plain read leaves no file of its own behind.
    mode = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'events'").fetchall():
            return []  # Its writer was killed, or is still, between making the file and the table.
        return connection.execute("SELECT time, kind, record FROM events ORDER BY id").fetchall()


def _unusable(path: Path, error: Exception) -> RunError:
    return RunError(f"{path} is not a journal that can be read: {error}", hint="name the folder of a run.")

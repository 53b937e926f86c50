"""State outlives the ranks that wrote it, and no byte of it that changed is ever taken for what was written."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from supernode.errors import CheckpointError
from supernode.keeping.client import Keep, check
from supernode.keeping.keepers import Keepers
from supernode.keeping.lines import Line
from supernode.keeping.slots import NOTHING
from supernode.schema.event import Event, Kept, Saved, Unsaved
from supernode.schema.job import JobSpec
from supernode.schema.lasting import CheckpointSpec, RecoverySpec
from supernode.schema.manifest import Manifest
from supernode.schema.plan import Layout, Plan
from supernode.storing.part import Piece, lay_out, stream_bytes
from supernode.storing.saves import Saves, name_of, saves_of

SIZE = 5000


def plan(*, ranks: int, nodes: int = 1) -> Plan:
    job = JobSpec(checkpoint=CheckpointSpec(keep=2, compress=False), recovery=RecoverySpec(nodes=nodes))
    return Plan(
        job=job, layout=Layout(data=ranks), machine="m", cards=tuple(range(ranks)), micro_batch=1, micro_batches=1,
        stages=(),
    )  # fmt: skip


def pieces(writer: int) -> tuple[Piece, ...]:
    box = "uint8", (SIZE * 4,), (SIZE * writer,), (SIZE,)
    return lay_out([("model.a", *box), (f"own.{writer}", "uint8", (3,), (0,), (3,))])


class Node:
    """Ranks as keepers see them, and the controller, in this process."""

    def __init__(self, folder: Path, made: Plan) -> None:
        (folder / "logs").mkdir(exist_ok=True)
        self.plan, self.folder = made, folder
        self.ranks: list[Keep] = []
        self.keepers = Keepers(folder, made)
        self.events: list[Event] = []
        self.begin(1)

    def begin(self, attempt: int, restored: int = NOTHING) -> None:
        self.attempt = attempt
        self.keepers.begin(self.plan, attempt=attempt)
        self.leave()
        self.ranks = [Keep(Line(self.keepers.attach(rank)), rank) for rank in range(self.plan.ranks)]
        for rank in self.ranks:
            rank.offer(pieces(rank.writer), step=restored, writers=self.plan.ranks, attempt=attempt)

    def leave(self) -> None:
        """Be gone, as ranks are that end in whatever way."""
        for rank in self.ranks:
            rank.close()

    def hand_over(self, rank: Keep, step: int, *, disk: bool = False) -> None:
        until(lambda: rank.free() is not None)
        slot = rank.free()
        assert slot is not None
        view = rank.view(slot)
        for piece in pieces(rank.writer):
            view[piece.start : piece.start + piece.nbytes] = content(piece, rank.writer, step)
        rank.whole(slot, step=step, disk=disk)

    def save(self, step: int, *, disk: bool = False) -> None:
        for rank in self.ranks:
            self.hand_over(rank, step, disk=disk)
        if disk:
            self.keepers.expect(step, asdict(manifest(step)), stall=0.5, attempt=self.attempt)

    def until(self, wanted: Event | Callable[[Event], bool]) -> Event:
        is_it = wanted if callable(wanted) else lambda event: event == wanted

        def heard() -> bool:
            self.events += self.keepers.hear()
            return any(map(is_it, self.events))

        until(heard)
        return next(event for event in self.events if is_it(event))


def content(piece: Piece, writer: int, step: int) -> bytes:
    return bytes((writer * 7 + step * 3 + number) % 251 for number in range(piece.nbytes))


def manifest(step: int) -> Manifest:
    return Manifest(step=step, samples=0, seed=0, model="m", data="d", layout="l", optimizer="o")


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.005)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    with ExitStack() as stack:

        def made(**words: object) -> Node:
            one = Node(tmp_path, plan(**words))  # type: ignore[arg-type]
            stack.callback(one.keepers.close)
            stack.callback(one.leave)
            return one

        yield made


def saves(one: Node) -> Saves:
    return saves_of(one.plan.job.checkpoint, one.folder / "checkpoints")


def fetched(keep: Keep, step: int) -> dict[int, bytes]:
    """Return what each writer's state is, as one rank gets it."""
    found = {}
    for writer, table in keep.tables(step).items():
        view, digests = keep.fetch(writer, step)
        for piece, digest in zip(table, digests, strict=True):
            check(view[piece.start : piece.start + piece.nbytes], piece, digest)
        found[writer] = bytes(view[: stream_bytes(table)])
    return found


def expected(step: int, writers: int) -> dict[int, bytes]:
    streams = {}
    for writer in range(writers):
        stream = bytearray(stream_bytes(pieces(writer)))
        for piece in pieces(writer):
            stream[piece.start : piece.start + piece.nbytes] = content(piece, writer, step)
        streams[writer] = bytes(stream)
    return streams


def test_state_outlives_its_ranks_and_goes_to_disk(node: Callable[..., Node]) -> None:
    one = node(ranks=2)

    one.save(4)
    one.until(Kept(step=4))
    one.save(5, disk=True)
    saved = one.until(lambda event: isinstance(event, Saved))
    one.hand_over(one.ranks[0], 6)  # The other is lost before it comes to that.
    one.leave()
    found = one.keepers.newest()
    one.begin(2, restored=5)

    assert isinstance(saved, Saved)
    assert (saved.step, saved.seconds, saved.nbytes >= 2 * SIZE) == (5, 0.5, True)
    assert found == (5, "memory")
    assert fetched(one.ranks[1], 5) == expected(5, 2)
    assert saves(one).verify(name_of(5)).layout == "l"
    # What ranks have their state from is not overwritten before the next is whole.
    assert all(rank.free() is not None and rank.free() != one.ranks[1]._last for rank in one.ranks[1:])


def test_memory_is_used_again_save_after_save_and_launch_after_launch(node: Callable[..., Node]) -> None:
    one = node(ranks=2)
    (pid,) = one.keepers.pids

    def held(of: int | str) -> tuple[int, int]:
        links = []
        for entry in Path(f"/proc/{of}/fd").iterdir():
            with suppress(OSError):  # The one that lists them is gone by then.
                links.append(os.readlink(entry))
        maps = Path(f"/proc/{of}/maps").read_text().count("supernode-slot")
        return maps, sum("supernode-slot" in link for link in links)

    counts = []
    for step in range(1, 21):
        one.save(step)
        one.until(Kept(step=step))
        if step % 5 == 0:
            one.leave()
            one.keepers.newest()
            one.begin(step, restored=step)
        counts.append((held(pid), held("self")))

    # Two slots for each of two ranks, there and here; a mapping holds a descriptor of its own.
    assert set(counts) == {((4, 8), (4, 8))}


def test_what_changed_in_memory_is_not_taken_for_state_and_what_was_kept_before_is(node: Callable[..., Node]) -> None:
    one = node(ranks=2)
    one.save(4)
    one.until(Kept(step=4))
    one.save(5)
    one.until(Kept(step=5))
    slots = one.ranks[1]._slots
    assert slots is not None
    slots.views[slots.steps.index(5)][10] ^= 1

    assert one.keepers.newest(verify=False) == (5, "memory")
    with pytest.raises(CheckpointError, match=r"`model\.a` in memory is not what was written"):
        fetched(one.ranks[0], 5)
    assert one.keepers.newest() == (4, "memory")


def test_what_lies_between_tensors_in_memory_does_not_get_to_disk(node: Callable[..., Node]) -> None:
    one = node(ranks=1)
    one.save(4)
    one.until(Kept(step=4))
    slots = one.ranks[0]._slots
    assert slots is not None
    for view in slots.views:
        view[SIZE] ^= 1  # the first byte behind a tensor
    one.save(5, disk=True)
    one.until(lambda event: isinstance(event, Saved) and event.step == 5)

    assert len(saves(one).verify(name_of(5)).files) == 1


def test_a_node_that_is_lost_is_made_good_from_its_partner_and_a_bad_copy_is_not_used(
    node: Callable[..., Node],
) -> None:
    one = node(ranks=4, nodes=2)
    one.save(7)
    one.until(Kept(step=7))
    one.save(8)
    one.until(Kept(step=8))
    # A byte of rank 0's own state flips: its partner's copy is as good.
    slots = one.ranks[0]._slots
    assert slots is not None
    slots.views[slots.steps.index(8)][1] ^= 255
    own = one.keepers.newest()
    os.kill(one.keepers.pids[1], signal.SIGKILL)
    until(lambda: bool(one.keepers.hear()) or one.keepers.is_lame)
    lost = one.keepers.newest()
    without = one.keepers.renew()
    one.begin(2, restored=7)

    assert own == (8, "partner")
    assert without == [2, 3]
    assert lost == (7, "partner")  # Rank 0's copy of step 8 went with that node.
    one.save(9)
    one.until(Kept(step=9))
    os.kill(one.keepers.pids[0], signal.SIGKILL)
    until(lambda: bool(one.keepers.hear()) or one.keepers.is_lame)
    assert one.keepers.renew() == [0, 1]
    assert one.keepers.newest() == (9, "partner")
    one.begin(3, restored=9)
    assert fetched(one.ranks[0], 9) == fetched(one.ranks[3], 9) == expected(9, 4)
    # Saves go on, and copies with them.
    one.save(10)
    one.until(Kept(step=10))


def test_a_save_that_fails_is_told_and_the_next_one_is_whole(node: Callable[..., Node]) -> None:
    one = node(ranks=2)
    one.save(1, disk=True)
    one.until(lambda event: isinstance(event, Saved))
    (one.folder / "checkpoints" / "packs").rename(one.folder / "packs")
    (one.folder / "checkpoints" / "packs").write_text("in the way")

    one.save(2, disk=True)
    told = one.until(lambda event: isinstance(event, Unsaved))
    (one.folder / "checkpoints" / "packs").unlink()
    (one.folder / "packs").rename(one.folder / "checkpoints" / "packs")
    one.save(3, disk=True)
    one.until(lambda event: isinstance(event, Saved) and event.step == 3)

    assert isinstance(told, Unsaved)
    assert told.step == 2
    assert one.keepers.under_way == []
    assert [step for step, _ in saves(one).all()] == [1, 3]
    saves(one).verify(name_of(3))


def test_what_ranks_of_an_earlier_launch_saved_is_no_part_of_a_later_save(node: Callable[..., Node]) -> None:
    one = node(ranks=2)
    one.save(1)
    one.until(Kept(step=1))
    one.hand_over(one.ranks[0], 2, disk=True)
    until(lambda: bool(one.events.extend(one.keepers.hear())) or one.keepers.under_way == [2])
    assert one.keepers.newest() == (1, "memory")
    assert one.keepers.under_way == []
    one.begin(2, restored=1)
    one.hand_over(one.ranks[1], 2, disk=True)
    one.keepers.expect(2, asdict(manifest(2)), stall=0.0, attempt=2)
    for _ in range(20):
        one.events += one.keepers.hear()
        time.sleep(0.01)
    assert not any(isinstance(event, Saved) for event in one.events)
    one.hand_over(one.ranks[0], 2, disk=True)
    one.until(lambda event: isinstance(event, Saved | Unsaved) and event not in one.events[:1])

    one.keepers.settle(limit=20)
    one.events += one.keepers.hear()
    for step, name in saves(one).all():
        saves(one).verify(name)
        assert step == 2


def test_a_torn_snapshot_is_given_up_whoever_tells_of_it_first(node: Callable[..., Node]) -> None:
    one = node(ranks=2)
    one.ranks[1].torn(3)
    told = one.until(lambda event: isinstance(event, Unsaved))
    one.hand_over(one.ranks[0], 3, disk=True)
    one.keepers.expect(3, asdict(manifest(3)), stall=0.0, attempt=1)
    one.save(4, disk=True)
    one.until(lambda event: isinstance(event, Saved))

    assert isinstance(told, Unsaved)
    assert (told.step, one.keepers.under_way) == (3, [])
    assert [step for step, _ in saves(one).all()] == [4]


def test_fewer_ranks_go_on_from_the_state_that_more_wrote(node: Callable[..., Node]) -> None:
    one = node(ranks=4)
    one.save(6)
    one.until(Kept(step=6))
    one.plan = plan(ranks=2)
    one.keepers.begin(one.plan, attempt=2)
    found = one.keepers.newest()
    one.begin(3)

    assert found == (6, "memory")
    assert fetched(one.ranks[1], 6) == expected(6, 4)


def test_a_save_whose_first_rank_is_lost_before_it_says_so_is_given_up_and_whole_ones_settle(
    node: Callable[..., Node],
) -> None:
    one = node(ranks=2)
    for rank in one.ranks:
        one.hand_over(rank, 1, disk=True)  # Nobody tells of its manifest.
    until(lambda: bool(one.events.extend(one.keepers.hear())) or one.keepers.under_way == [1])
    one.save(2, disk=True)
    found = one.keepers.newest()
    one.keepers.settle(limit=20)
    one.events += one.keepers.hear()

    assert found == (2, "memory")
    assert [(type(event), event.step) for event in one.events if isinstance(event, Saved | Unsaved)] == [
        (Unsaved, 1), (Saved, 2)
    ]  # fmt: skip
    assert one.keepers.under_way == []

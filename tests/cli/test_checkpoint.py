"""`supernode checkpoint`: what people see of a run's disks, and what they are told where something is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.storing.conftest import manifest

from supernode.checkpoint.source import whole
from supernode.control import runs
from supernode.control.journal import Journal
from supernode.foreign.look import look
from supernode.foreign.source import Foreign
from supernode.schema.event import Saved, Started
from supernode.schema.job import JobSpec
from supernode.schema.lasting import CheckpointSpec
from supernode.schema.plan import Layout, Plan
from supernode.storing.chunks import CHUNK
from supernode.storing.part import lay_out
from supernode.storing.saves import Saves, name_of, saves_of

Command = Callable[..., tuple[int, str, str]]
NUMBERS = CHUNK  # of float32: four chunks


def values(step: int) -> np.ndarray:
    """Return the weights of a step: one chunk differs from another step's."""
    found = np.random.default_rng(0).standard_normal(NUMBERS, dtype=np.float32)
    found[5] = step
    return found


@pytest.fixture
def saves(tmp_path: Path, terminal: Command) -> Saves:
    """Return the saves of a run named `small` at steps 50 and 100, on three disks any of which may be lost."""
    del terminal
    disks = tuple(str(tmp_path / f"disk{number}") for number in range(3))
    job = JobSpec(name="small", steps=100, checkpoint=CheckpointSpec(disks=disks, parity=1))
    run = runs.create(tmp_path / "runs" / "small", job)
    journal = Journal(run.path / runs.JOURNAL)
    plan = Plan(job=job, layout=Layout(), machine="m", cards=(0,), micro_batch=16, micro_batches=1, stages=())
    journal.append(Started(plan=plan), 1.0)
    there = saves_of(job.checkpoint, run.checkpoints)
    pieces = lay_out([("model.w", "float32", (NUMBERS,), (0,), (NUMBERS,))])
    for step in (50, 100):
        before = there.before(name_of(50), there.manifest(name_of(50)), 0) if step == 100 else None
        stored, _ = there.store(step, 0, memoryview(values(step)).cast("B"), pieces, before=before)
        there.commit(manifest(step), [stored])
        journal.append(Saved(step=step, checkpoint=name_of(step), nbytes=stored.nbytes, seconds=0.25), 2.0)
    journal.close()
    run.release()
    return there


def refused(answer: tuple[int, str, str], *named: str) -> None:
    """Check for exit code 2 and an error with a remedy that names what is wrong."""
    code, _, err = answer
    assert code == 2, err
    assert err.startswith("error: "), err
    assert "\nhint: " in err, err
    for words in named:
        assert words in err, err


def test_a_list_tells_what_is_new_in_each_and_where_it_lies(saves: Saves, terminal: Command) -> None:
    code, out, _ = terminal("checkpoint", "list", "small", "--json")
    told, shown, _ = terminal("checkpoint", "list", "small")

    first, second = json.loads(out)
    assert code == told == 0
    assert [one["name"] for one in (first, second)] == [name_of(50), name_of(100)]
    assert first["whole"] == second["whole"] == 4 * NUMBERS
    assert first["new"] == pytest.approx(4 * CHUNK, abs=500)
    assert second["new"] == pytest.approx(CHUNK, abs=500)
    assert second["on_disk"] == pytest.approx(5 * CHUNK, abs=500)
    assert second["seconds"] == 0.25
    assert second["disks"] == [disk.where for disk in saves.disks]
    assert name_of(100) in shown


def test_damage_is_named_with_its_disk_repaired_and_then_gone(saves: Saves, terminal: Command, tmp_path: Path) -> None:
    whole = terminal("checkpoint", "verify", "small", "--json")
    pack = next((tmp_path / "disk1" / "packs").glob("00000100-*"))
    data = bytearray(pack.read_bytes())
    data[40] ^= 1
    pack.write_bytes(data)
    shutil.rmtree(tmp_path / "disk2" / name_of(50))

    code, out, _ = terminal("checkpoint", "verify", "small", "--json")
    refused(terminal("checkpoint", "verify", "small"), "3 of the files", "checkpoint repair small")
    held = runs.RunFolder(tmp_path / "runs" / "small").hold()
    refused(terminal("checkpoint", "repair", "small"), "another controller")
    held.release()
    mended, _, _ = terminal("checkpoint", "repair", "small")
    after, _, _ = terminal("checkpoint", "verify", "small")

    assert (whole[0], code, mended, after) == (0, 2, 0, 0)
    assert {name: (one["gaps"], one["lost"]) for one in json.loads(out) for name in [one["name"]]} == {
        name_of(50): (
            [
                [str(tmp_path / "disk2"), f"{name_of(50)}/manifest.json", "missing"],
                [str(tmp_path / "disk2"), f"{name_of(50)}/part-0000", "missing"],
            ],
            "",
        ),
        name_of(100): ([[str(tmp_path / "disk1"), f"packs/{pack.name}", "damaged"]], ""),
    }
    saves.verify(name_of(50))


def test_what_no_disk_can_give_is_said_to_be_lost(saves: Saves, terminal: Command, tmp_path: Path) -> None:
    del saves
    for number in (0, 1):
        shutil.rmtree(tmp_path / f"disk{number}" / "packs")

    refused(terminal("checkpoint", "verify", "small", "--checkpoint", "100"), "model.w", "packs/", "bring back a disk")
    refused(terminal("checkpoint", "repair", "small"), "cannot be made whole")


def test_a_difference_counts_the_numbers_that_changed(saves: Saves, terminal: Command) -> None:
    del saves
    code, out, _ = terminal("checkpoint", "diff", "small", "--from", "50", "--json")

    assert code == 0
    assert json.loads(out) == [{"name": "model.w", "what": "changed", "differing": 1, "numbers": NUMBERS}]
    same, nothing, _ = terminal("checkpoint", "diff", "small", "--from", "50", "--to", "step-00000050", "--json")
    assert (same, json.loads(nothing)) == (0, [])


def test_what_is_exported_is_read_by_others_and_comes_back(saves: Saves, terminal: Command, tmp_path: Path) -> None:
    code, out, _ = terminal("checkpoint", "export", "small", "--out", "weights", "--checkpoint", "50", "--json")
    everything, _, _ = terminal("checkpoint", "export", "small", "--out", "all", "--everything")
    for disk in saves.disks:
        disk.delete(name_of(100))
    back, name, _ = terminal("checkpoint", "import", "small", "--files", "all", "--json")

    assert (code, everything, back) == (0, 0, 0)
    assert json.loads(out) == {"files": ["weights/model.safetensors"]}
    assert np.array_equal(load_file(tmp_path / "weights" / "model.safetensors")["w"], values(50))
    assert json.loads(name) == {"checkpoint": name_of(100)}
    assert saves.verify(name_of(100)).samples == 800
    refused(terminal("checkpoint", "import", "small", "--files", "all"), "already")
    refused(terminal("checkpoint", "import", "small", "--files", "weights"), "weights alone", "--everything")
    refused(terminal("checkpoint", "import", "small", "--files", "nothing"), "nothing", "not there")


def test_pytorch_reads_what_is_exported_for_it_while_a_disk_is_lost(
    saves: Saves, terminal: Command, tmp_path: Path
) -> None:
    del saves
    shutil.rmtree(tmp_path / "disk1")

    code, _, err = terminal("checkpoint", "export", "small", "--out", "dcp", "--checkpoint", "50", "--format", "dcp")

    assert code == 0, err
    assert sorted(path.name for path in (tmp_path / "dcp").iterdir()) == [".metadata", "__0_0.distcp"]
    found = look(tmp_path / "dcp")
    assert set(found.tensors) == {"model.w"}
    assert np.array_equal(whole("model.w", Foreign(found)).numpy(), values(50))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".draft")]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("list nowhere", ("no run in nowhere",)),
        ("verify small --checkpoint 7", ("`7`", name_of(50))),
        ("verify small --checkpoint ../../etc", ("../../etc",)),
        ("repair small --checkpoint step-1", ("step-1",)),
        ("diff small --from 7", ("`7`",)),
        ("diff small", ("--from",)),
        ("export small --out disk0", ("disk0 is there already", "--out")),
        ("export small --out new --shard 5XB", ("--shard", "5XB")),
        ("export small --out new --shard 0", ("--shard",)),
        ("export small --out new --format zip", ("--format", "dcp")),
        ("export small --out new --names lama", ("--names", "llama")),
        ("export small --out new --names llama --everything", ("--everything", "--format dcp")),
        ("export small --out disk0 --format dcp", ("disk0 is there already", "--out")),
        ("list nosuch://bucket", ("nosuch",)),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_remedy(
    saves: Saves, terminal: Command, words: str, named: tuple[str, ...]
) -> None:
    del saves

    refused(terminal("checkpoint", *words.split()), *named)


def test_a_folder_of_checkpoints_is_looked_into_without_a_run(saves: Saves, terminal: Command, tmp_path: Path) -> None:
    del saves
    code, out, _ = terminal("checkpoint", "list", str(tmp_path / "disk0"), "--json")

    assert code == 0
    assert [one["step"] for one in json.loads(out)] == [50, 100]

"""Whatever the user's code does in its own process, the asker gets a trace or an error with a remedy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from supernode.backends.tracing import trace
from supernode.errors import DataError, ModelError
from supernode.schema.job import DataSpec, JobSpec
from supernode.schema.trace import TraceRequest

pytestmark = pytest.mark.slow

FILE = """
import os, sys, threading, time
import torch
from torch import nn

class Points(torch.utils.data.Dataset):
    def __len__(self): return 3
    def __getitem__(self, index):
        return torch.tensor([float(index)] * 6), torch.tensor(index).clamp(0, 1)

def points(): return Points()
def nothing(): return []
def fine():
    print("hello")
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
def dies(): os._exit(3)
def sleeps(): time.sleep(600)
def raises(): raise RuntimeError("no weights at hand")
class Wrong(nn.Linear):
    def forward(self, x):
        return super().forward(x.reshape(5, -1))
def wrong(): return Wrong(6, 2)
def leaves_a_thread():
    threading.Thread(target=time.sleep, args=(300,)).start()
    return fine()
def leaves_a_thread_and_exits():
    threading.Thread(target=time.sleep, args=(300,)).start()
    sys.exit("no licence")
def leaves_a_child():
    pid = os.fork()
    if pid == 0:
        time.sleep(300)
    open(os.path.join(os.path.dirname(__file__), "left"), "w").write(str(pid))
    return fine()
def leaves_a_session():
    code = "import os, time; open('left', 'w').write(str(os.getpid())); os.rename('left', 'left_'); time.sleep(300)"
    import subprocess
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True, cwd=os.path.dirname(__file__))
    while not os.path.exists(os.path.join(os.path.dirname(__file__), "left_")):
        time.sleep(0.05)
    return fine()
def leaves_a_child_and_dies():
    leaves_a_child()
    os._exit(4)
def leaves_a_child_that_talks_and_dies():
    if os.fork() == 0:
        while True:
            os.write(2, b"still here" * 1000)
    os._exit(5)
def comes_back_twice():
    os.fork()
    return fine()
def talks():
    for _ in range(20_000):
        print("x" * 100)
    for descriptor in range(3, 20):
        try: os.write(descriptor, b'{"trace": 1}')
        except OSError: pass
    return fine()
def works_forever():
    open(os.path.join(os.path.dirname(__file__), "pid"), "w").write(f"{os.getpid()}.")
    while True: pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def request(file: Path, function: str, dataset: str = "points") -> TraceRequest:
    job = JobSpec(model=f"{file}:{function}", data=DataSpec(dataset=f"{file}:{dataset}"))
    return TraceRequest(job=job, micro_batch=4)


def test_a_module_that_prints_is_traced(file: Path) -> None:
    found = trace(request(file, "fine"))

    assert found.parameters == 6 * 4 + 4 + 4 * 2 + 2
    assert found.children == ("0", "1", "2")
    assert found.flops(10) == pytest.approx(10 * 2 * (2 * 24 + 3 * 8))  # nothing asks for the input's gradient


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("raises", r"raised RuntimeError: no weights at hand \(mine\.py, line 18\)"),
        ("wrong", r"RuntimeError: .*mine\.py, line 21"),
        ("dies", "ended with exit code 3"),
        ("absent", "has no function `absent`"),
    ],
)
def test_what_goes_wrong_names_the_line_and_shows_no_traceback(file: Path, function: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        trace(request(file, function))

    assert "Traceback" not in str(caught.value)
    assert caught.value.hint


def test_data_that_cannot_be_read_is_told_as_such(file: Path) -> None:
    with pytest.raises(DataError, match="empty"):
        trace(request(file, "fine", dataset="nothing"))


def test_code_that_hangs_is_ended(file: Path) -> None:
    with pytest.raises(ModelError, match="more than 8 s"):
        trace(request(file, "sleeps"), most_seconds=8)


def is_there(pid: int) -> bool:
    """Tell whether a process is at work; one that nobody has reaped yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int) -> None:
    for _ in range(300):
        if not is_there(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} is still there")


@pytest.mark.parametrize(
    "function", ["leaves_a_thread", "leaves_a_child", "leaves_a_session", "comes_back_twice", "talks"]
)
def test_the_answer_is_taken_whatever_is_left_behind(file: Path, function: str) -> None:
    found = trace(request(file, function), most_seconds=60)

    assert found.parameters == 6 * 4 + 4 + 4 * 2 + 2
    for left in file.parent.glob("left*"):
        wait_until_gone(int(left.read_text()))
    assert len(list(file.parent.glob("left*"))) == (function in ("leaves_a_child", "leaves_a_session"))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("leaves_a_thread_and_exits", "raised SystemExit: no licence"),
        ("leaves_a_child_and_dies", "exit code 4"),
        ("leaves_a_child_that_talks_and_dies", "exit code 5"),
    ],
)
def test_the_end_is_seen_whatever_is_left_behind(file: Path, function: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        trace(request(file, function), most_seconds=60)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_goes_on_when_the_asker_is_ended(file: Path, end: signal.Signals) -> None:
    code = f"""
        from supernode.backends.tracing import trace
        from supernode.schema.job import DataSpec, JobSpec
        from supernode.schema.trace import TraceRequest
        job = JobSpec(model="{file}:works_forever", data=DataSpec(dataset="{file}:points"))
        trace(TraceRequest(job=job, micro_batch=4))
    """
    asker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    while not (file.parent / "pid").exists() or not (file.parent / "pid").read_text().endswith("."):
        assert asker.poll() is None
        time.sleep(0.1)
    pid = int((file.parent / "pid").read_text().rstrip("."))
    assert is_there(pid)

    asker.send_signal(end)

    assert asker.wait() == -end
    wait_until_gone(pid)


def test_a_thread_may_ask_after_the_one_that_started_it_has_ended(file: Path) -> None:
    found: list[int] = []
    asks = threading.Thread(target=lambda: found.append(trace(request(file, "fine")).parameters))
    starts = threading.Thread(target=asks.start)
    starts.start()
    starts.join()
    asks.join()

    assert found == [6 * 4 + 4 + 4 * 2 + 2]

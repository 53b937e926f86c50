"""What do Ctrl-C, SIGTERM and SIGHUP do while a run is prepared, and while it is under way?"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from supernode.schema.event import Event, StopAsked


@contextmanager
def _handling(numbers: tuple[signal.Signals, ...], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handle signals otherwise for a while; those that are ignored, as under `nohup`, stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end what is being prepared as Ctrl-C does: what was made for it is removed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with _handling((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield


@contextmanager
def interrupts() -> Iterator[Callable[[], Event | None]]:
    """Turn the first Ctrl-C (or SIGTERM, SIGHUP) into a wish to save and stop, and the second into stopping now."""
    wishes: list[Event] = []
    times = 0

    def wish(number: int, _: object) -> None:
        nonlocal times
        if number == signal.SIGHUP and times:
            return  # A terminal that closes sends several.
        times += 1
        wishes.append(StopAsked(now=times > 1))

    def asked() -> Event | None:
        return wishes.pop(0) if wishes else None

    with _handling((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), wish):
        yield asked

"""Ctrl-C and SIGTERM in a run: it saves itself at its next step, then ends as it would have ended without."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from ..errors import Interrupted, Terminated


class Interruptible(Protocol):
    """A run that can be asked for an end."""

    def interrupt(self) -> None:
        """Save at the next step, and end by `Interrupted`."""

    def save_soon(self) -> None:
        """Save at the next step, and go on."""


#: What a loader raises whose worker has ended, also within a message.
LOST_WORKER = (RuntimeError, ConnectionError, EOFError)


@contextmanager
def interruptible(run: Interruptible) -> Iterator[None]:
    """While open, in the main thread, Ctrl-C and SIGTERM ask the run to save itself and end at its next step.

    Handlers of the program's own are called at once; what they raise is raised when the run is saved, and one that
    returns lets the run go on. A second Ctrl-C ends at once; a second SIGTERM changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Others are not Python's to handle, or those of a job in the background.
    before = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}
    raised: list[BaseException] = []
    children: list[Any] = []

    def asked(number: int, frame: FrameType | None) -> None:
        if raised:
            return
        try:
            if before[number] is signal.SIG_DFL:
                raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
            before[number](number, frame)
        except BaseException as error:
            raised.append(error)
            if signal.SIGINT in before:
                signal.signal(signal.SIGINT, before[signal.SIGINT])
            if number == signal.SIGTERM:  # schedulers end all processes: loaders of PyTorch raise where theirs die
                children.append(signal.signal(signal.SIGCHLD, lambda *_: None))
            run.interrupt()
        else:
            run.save_soon()

    for number in before:
        signal.signal(number, asked)
    try:
        yield
    except Interrupted as end:
        if not raised:  # another process of the run was asked
            raise
        raise _told(raised[0], end, before) from end
    except LOST_WORKER as error:
        ended = "DataLoader worker" in str(error) or not isinstance(error, RuntimeError)
        if not (raised and children and ended):
            raise
        raise raised[0] from error
    finally:
        for old in children:
            signal.signal(signal.SIGCHLD, old)
        for number, old in before.items():
            signal.signal(number, old)
    if raised:  # too late for a step, and yet the program was asked to end
        raise raised[0]


def _told(error: BaseException, end: Interrupted, before: dict[int, Any]) -> BaseException:
    """What was raised, with the words of the run's end where it has none of its own."""
    if isinstance(error, Terminated):
        if before[signal.SIGTERM] is signal.SIG_DFL:  # nobody prints what `SystemExit` says
            print(f"dubito: {end}", file=sys.stderr, flush=True)
        return Terminated(str(end))
    return end if type(error) is KeyboardInterrupt else error

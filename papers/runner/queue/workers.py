"""Processes that run cells: one thread each, of the lowest priority, gone with the queue that started them."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Hashable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from dubito.errors import Interrupted

from ..experiment import Cell
from ..jobs import Finished, lost, work

NICENESS = 19
#: Seconds that a worker has to save its training before it is killed.
PATIENCE = 20.0


class Died(Exception):
    """A worker's process that ended in the middle of a task."""


class Worker:
    """One process, with at most one task."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # forked processes would share the queue's locks
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, NICENESS))
        self.process.start()
        self.ready = False
        self.shared: set[Hashable] = set()  # what it has in memory
        other.close()

    def give(self, module: str, table: str, scale: str, cells: Sequence[Cell]) -> None:
        """Hand over cells of a table's experiment."""
        self.connection.send((module, table, scale, tuple(cells)))

    def take(self) -> list[Finished] | None:
        """What became of the cells; None from a process that has just started; raises where it died."""
        try:
            finished = self.connection.recv()
            self.ready = True
            return finished
        except (EOFError, OSError) as error:
            self.process.join()
            raise Died(ending(self.process.exitcode)) from error

    def stop(self) -> None:
        """Ask for an end: a training with a checkpoint saves it first; one that is starting has nothing to save."""
        if not self.ready:
            self.process.kill()
        elif self.process.pid is not None and self.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGINT)

    def end(self) -> None:
        """Wait for the end after `stop`, and force it where it does not come."""
        self.connection.close()
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def ending(code: int | None) -> str:
    """How a process ended, in words."""
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with code {code}"


def serve(connection: Connection, niceness: int) -> None:
    """Run tasks until the queue closes the connection or asks for an end.

    Args:
        connection: to the queue.
        niceness: of this process.
    """
    os.setpgrp()  # a terminal's Ctrl-C reaches the queue, which asks once
    # What a script starts in the background ignores the signal that asks for an end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.nice(niceness)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        connection.send(None)
        while True:
            module, table, scale, cells = connection.recv()
            connection.send(_run(module, table, scale, cells))


def _run(module: str, table: str, scale: str, cells: tuple[Cell, ...]) -> list[Finished]:
    try:
        tables: Sequence[Any] = import_module(module).TABLES
        experiment = next(entry.experiment for entry in tables if entry.name == table)
        return work(experiment, scale, cells)
    except Interrupted:
        raise
    except Exception as error:  # a cell that fails must not take the queue along
        return [lost(cell, f"{type(error).__name__}: {error}") for cell in cells]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

"""Cells claimed by lock files, so that two queues do not run the same one.

A claim is a lock of the operating system on a file: it ends with the process that holds it, so that the claim of a dead
queue is free at once, whatever file it left behind.
"""

import json
import os
import socket
from pathlib import Path

from dubito.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class Claims:
    """The claims this process holds.

    Args:
        folder: of the lock files, the same for all queues.
    """

    def __init__(self, folder: Path) -> None:
        if fcntl is None:
            raise ConfigError("the queue locks files as POSIX systems do; run it on Linux or macOS, or in WSL")
        self.folder = folder
        self._handles: dict[Path, int] = {}

    def take(self, names: list[Path]) -> bool:
        """Claim all of some cells, or none where another queue has one of them.

        Args:
            names: of lock files below the folder.
        """
        for number, name in enumerate(names):
            handle = _locked(self.folder / name)
            if handle is None:
                self.release(names[:number])
                return False
            self._handles[name] = handle
        return True

    def release(self, names: list[Path]) -> None:
        """Give claims back and remove their files."""
        for name in names:
            handle = self._handles.pop(name, None)
            if handle is not None:
                (self.folder / name).unlink(missing_ok=True)  # while it is locked: nobody else's goes
                os.close(handle)

    def sweep(self) -> None:
        """Remove the files of queues that were killed: nobody holds their locks."""
        for path in list(self.folder.rglob("*")):
            name = path.relative_to(self.folder)
            if path.is_file() and self.take([name]):
                self.release([name])

    def release_all(self) -> None:
        """Give back what is left."""
        self.release(list(self._handles))


def _locked(path: Path) -> int | None:
    """A handle that holds the lock of a file; None where another process has it."""
    assert fcntl is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        if _same_file(path, handle):
            os.ftruncate(handle, 0)
            os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
            return handle
        os.close(handle)  # removed by its holder between opening and locking


def _same_file(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False

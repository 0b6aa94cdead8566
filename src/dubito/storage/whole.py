"""Files that appear whole or not at all."""

import glob
import os
import re
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

#: How folders of files that are being written end, and the seconds after which one was surely given up.
PARTIAL, STALE = ".partial", 600


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The path of a file to be written, which takes the place of `path` in one move if nothing fails.

    It lies in a folder of its own beside `path`, since some writers make further files beside theirs; what a killed
    process left there is removed by the next one that writes `path`.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
        if _given_up(left):
            _remove(left)
    prefix = f".{path.name}.{_machine()}-{os.getpid()}-"
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=prefix, suffix=PARTIAL))
    temporary = folder / f"writing{PARTIAL}"
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # some writers give 0600; what is kept is as readable as other files
        temporary.replace(path)
    finally:
        _remove(folder)


def _given_up(left: Path) -> bool:
    """Whether the writer of a folder was killed: its process is gone from this machine, or nothing happens for long."""
    writer = re.search(rf"\.([0-9a-f]{{8}})-(\d+)-[^.]*{re.escape(PARTIAL)}$", left.name)
    if writer and writer[1] == _machine() and os.name == "posix":
        try:
            os.kill(int(writer[2]), 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):  # somebody else's, or no number of a process
            pass
    with suppress(OSError):  # it has just gone
        return time.time() - max(item.stat().st_mtime for item in (left, *left.glob("*"))) > STALE
    return False


def _remove(left: Path) -> None:
    if left.is_dir():
        shutil.rmtree(left, ignore_errors=True)
    else:  # by an earlier version
        left.unlink(missing_ok=True)


@cache
def _machine() -> str:
    """A mark of what gives processes their numbers: the host, and a container on it."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux
        numbers = ""
    return f"{zlib.crc32(f'{socket.gethostname()} {numbers}'.encode()):08x}"


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

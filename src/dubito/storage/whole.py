"""Files that appear whole or not at all, and what a path may be."""

import glob
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..errors import ConfigError, StorageError

#: How folders of files that are being written end, and the seconds after which one was surely given up.
PARTIAL, STALE = ".partial", 600


def file_path(path: Any, verb: str) -> tuple[Path, bool]:
    """The file behind a path, links followed, and whether it exists; what can be no file is refused.

    Args:
        path: what a user gave.
        verb: what is to be done with it, for messages.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"a path must be a string or a pathlib.Path, got {path!r}")
    try:
        target = Path(os.path.realpath(path))
    except (OSError, ValueError, TypeError) as error:  # a name too long, a loop of links, a NUL; bytes
        raise StorageError(f"cannot {verb} {str(path)!r}: {error}") from error
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return target, False
    except OSError as error:
        raise StorageError(f"cannot {verb} {str(path)!r}: {error}") from error
    if stat.S_ISDIR(mode):
        raise StorageError(f"cannot {verb} {path}: it is a folder; give the name of a file in it")
    if not stat.S_ISREG(mode):
        raise StorageError(f"cannot {verb} {path}: it is a device, a FIFO or a socket; give a regular file")
    return target, True


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The path of a file to be written, which takes the place of `path` in one move if nothing fails.

    A link stays one, and the file it points to is replaced. What the disk refuses is a `StorageError`, and what was at
    `path` is still there.
    """
    target, _ = file_path(path, "write")
    if not target.parent.is_dir():
        raise StorageError(f"cannot write {path}: the folder {target.parent} does not exist; create it first")
    try:
        with _replacing(target) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write {path}: {error}; what was there before is untouched") from error


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file in a folder of its own beside `path`, since some writers make further files beside theirs.

    What a killed process left there is removed by the next one that writes `path`, or goes on from it.
    """
    remove_given_up(path)
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


def remove_given_up(path: Path) -> None:
    """Remove what killed writers of a file left beside it."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
        if _given_up(left):
            _remove(left)


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

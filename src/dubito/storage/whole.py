"""Files that appear whole or not at all, and what a path may be."""

import glob
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..errors import ConfigError, StorageError

#: How files that are being written end, and the seconds after which one was surely given up.
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
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return target, False
    except (OSError, ValueError, TypeError) as error:  # a name too long, a loop of links, a NUL; bytes
        raise StorageError(f"cannot {verb} {str(path)!r}: {error}") from error
    if stat.S_ISDIR(mode):
        raise StorageError(f"cannot {verb} {path}: it is a folder; give the name of a file in it")
    if not stat.S_ISREG(mode):
        raise StorageError(f"cannot {verb} {path}: it is a device, a FIFO or a socket; give a regular file")
    return target, True


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The path of a file beside `path`, to be written, which takes its place in one move if nothing fails.

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
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
        with suppress(FileNotFoundError):  # another writer has removed or moved it meanwhile
            if time.time() - left.stat().st_mtime > STALE:  # by a process killed while writing
                left.unlink()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp gives 0600; what is kept is as readable as other files
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

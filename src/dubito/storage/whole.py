"""Files that appear whole or not at all."""

import glob
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: How files that are being written end, and the seconds after which one was surely given up.
PARTIAL, STALE = ".partial", 600


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The path of a file beside `path`, to be written, which takes its place in one move if nothing fails."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
        if time.time() - left.stat().st_mtime > STALE:  # by a process killed while writing
            left.unlink(missing_ok=True)
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

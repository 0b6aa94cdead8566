"""One file from its publisher: resumed where it broke off, checked by size and sha256, put in place whole."""

import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dubito.errors import StorageError
from dubito.lazy import rich_console

CHUNK = 1 << 20
TIMEOUT = 30  # seconds without a byte
STALE = 3600  # seconds after which a piece that a killed process left is nobody's


def sha256_of(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(url: str, target: Path, *, size: int, sha256: str) -> None:
    """Download `url` to `target`; what lies there in the end is whole and checked, or nothing does.

    A broken download stays beside the target as `.part` and is continued by the next call. Processes that
    fetch the same file at once each write a piece of their own.

    Raises:
        OSError: the publisher could not be reached, or the connection broke.
        StorageError: what came is not the file it should be; it has been discarded.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    piece = target.with_name(f"{target.name}.part.{os.getpid()}")
    _discard_stale(target)
    with suppress(FileNotFoundError):
        os.replace(part, piece)  # whoever renames it first may continue it
    try:
        _complete(url, piece, size)
        digest = sha256_of(piece)
        if digest != sha256:
            piece.unlink()
            raise StorageError(
                f"{url} should have sha256 {sha256}, got {digest}; it was discarded: try again, "
                "and if it stays so the publisher's file has changed"
            )
        os.replace(piece, target)
    finally:
        with suppress(FileNotFoundError):
            os.replace(piece, part)


def _discard_stale(target: Path) -> None:
    for piece in target.parent.glob(f"{target.name}.part.*"):
        with suppress(FileNotFoundError):
            if time.time() - piece.stat().st_mtime > STALE:
                piece.unlink()


def _complete(url: str, piece: Path, size: int) -> None:
    """Bring the piece to its full size, from where it ends."""
    start = piece.stat().st_size if piece.exists() else 0
    if start > size:
        piece.unlink()
        start = 0
    if start == size:
        return
    headers = {"User-Agent": "dubito", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if start and error.code == 416:  # this range is not offered: what we hold cannot be continued
            piece.unlink()
            _complete(url, piece, size)
            return
        raise OSError(f"{url} answered {error.code} {error.reason}") from error
    with response:
        if response.status != 206 or _first_byte(response) != start:
            start = 0  # the whole file comes
        length = response.headers.get("Content-Length")
        if length is not None and start + int(length) != size:
            piece.unlink(missing_ok=True)
            raise StorageError(
                f"{url} should have {size} bytes, the publisher offers {start + int(length)}: the file has "
                "changed, nothing of it was kept"
            )
        with piece.open("r+b" if start else "wb") as file, _DownloadBar(piece.name, size, start) as advance:
            file.seek(start)
            _copy(response, file, size - start, advance)
    held = piece.stat().st_size
    if held < size:
        raise OSError(f"{url} broke off after {held} of {size} bytes; the next call continues there")


def _first_byte(response: Any) -> int:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else 0


def _copy(response: Any, file: Any, size: int, advance: Callable[[int], None]) -> None:
    """At most `size` bytes; a connection that breaks ends it early, what came is kept."""
    try:
        while size and (chunk := response.read(min(CHUNK, size))):
            file.write(chunk)
            size -= len(chunk)
            advance(len(chunk))
    except http.client.HTTPException as error:
        raise OSError(f"the connection broke: {error!r}") from error
    finally:
        file.flush()
        os.fsync(file.fileno())


class _DownloadBar:
    """A bar on the terminal's error stream; nothing where there is no terminal."""

    def __init__(self, name: str, size: int, start: int) -> None:
        console = rich_console()(stderr=True)
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task(name, total=size, completed=start)

    def __enter__(self) -> Callable[[int], None]:
        self.bar.start()
        return lambda count: self.bar.advance(self.task, count)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

"""Where data lies: the folders of DUBITO_DATA, the user's cache, and what is fetched into it."""

import hashlib
import os
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from dubito.errors import DataError, StorageError

from .catalogue import ENTRIES
from .download import fetch, sha256_of
from .registry import Entry, File, Pair, Raw, StoredForm, TaskKind

#: What was found right in this process, by path, size and time of change.
_verified: set[tuple[str, int, int, str]] = set()


def cache_folder() -> Path:
    """The folder downloads go to."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "dubito" / "data"


def folders() -> list[Path]:
    """Where data is looked for, in order: the path list DUBITO_DATA, then the cache."""
    return [*_given(), cache_folder()]


def _given() -> list[Path]:
    given = os.environ.get("DUBITO_DATA", "").split(os.pathsep)
    return [Path(folder).expanduser() for folder in given if folder]


def absent_folders() -> list[Path]:
    """Folders of DUBITO_DATA that are not there."""
    return [folder for folder in _given() if not folder.is_dir()]


def _path(file: File) -> Path | None:
    return next((path for folder in folders() if (path := folder / file.path).is_file()), None)


def _paths(form: StoredForm) -> list[Path] | None:
    paths = [_path(file) for file in form.files]
    return None if None in paths else [path for path in paths if path is not None]


def obtain(name: str, entry: Entry, *, download: bool) -> Raw:
    """The arrays of a data set that lies in files: found, else fetched, checked and read."""
    for form in entry.forms:
        if paths := _paths(form):
            return _read(name, form, paths)
    form = next((form for form in entry.forms if all(file.fetchable for file in form.files)), None)
    if form is None or not download:
        raise _absent(name, entry, None)
    for file in form.files:
        if _path(file) is None:
            assert file.url and file.size and file.sha256
            try:
                fetch(file.url, cache_folder() / file.path, size=file.size, sha256=file.sha256)
            except OSError as error:
                raise _absent(name, entry, error) from error
    paths = _paths(form)
    assert paths
    return _read(name, form, paths)


def _read(name: str, form: StoredForm, paths: Sequence[Path]) -> Raw:
    for file, path in zip(form.files, paths, strict=True):
        _verify(file, path)
    where = ", ".join(map(str, paths))
    try:
        raw = form.read(paths)
    except (
        KeyError,
        IndexError,
        ValueError,
        OSError,
        EOFError,
        zipfile.BadZipFile,
        tarfile.TarError,
        zlib.error,
    ) as error:
        raise StorageError(
            f"{where} should hold {name!r} in the form the file's name says, but reading it failed "
            f"({type(error).__name__}: {error}); remove it and fetch it again"
        ) from error
    parts = {"train": raw.train, "validation": raw.validation, "test": raw.test}
    held = {part: pair for part, pair in parts.items() if pair is not None and len(pair[0])}
    shapes = {part: pair[0].shape for part, pair in held.items()}
    lengths = {part: len(pair[1]) for part, pair in held.items()}
    if shapes != form.shapes or lengths != {part: shape[0] for part, shape in form.shapes.items()}:
        raise StorageError(
            f"{where} should hold {name!r}, inputs {_shown(form.shapes)} and as many targets; got inputs "
            f"{_shown(shapes)} and targets {lengths}; remove it and fetch it again"
        )
    if form.content is not None:
        _verify_content(name, form, paths, list(held.values()))
    return raw


def _shown(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{part} {list(shape)}" for part, shape in shapes.items()) or "nothing"


def _mark(path: Path, sha256: str) -> tuple[str, int, int, str]:
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns, sha256


def _verify(file: File, path: Path) -> None:
    """Refuse a file of the wrong size or checksum; hashed once per process while it does not change."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        raise StorageError(f"{path} should have {file.size} bytes, got {size}; remove it, or put the right file there")
    if file.sha256 is None or _mark(path, file.sha256) in _verified:
        return
    digest = sha256_of(path)
    if digest != file.sha256:
        raise StorageError(
            f"{path} should have sha256 {file.sha256}, got {digest}; remove it, or put the right file there"
        )
    _verified.add(_mark(path, file.sha256))


def content_sha256(pairs: Sequence[Pair]) -> str:
    """The checksum of arrays, whatever file they came from."""
    digest = hashlib.sha256()
    for array in (array for pair in pairs for array in pair):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _verify_content(name: str, form: StoredForm, paths: Sequence[Path], pairs: Sequence[Pair]) -> None:
    assert form.content is not None
    marks = {_mark(path, form.content) for path in paths}
    if marks <= _verified:
        return
    digest = content_sha256(pairs)
    if digest != form.content:
        raise StorageError(
            f"{', '.join(map(str, paths))} should hold {name!r}, whose numbers have sha256 {form.content}, "
            f"got {digest}; remove it, or put the publisher's file there unchanged"
        )
    _verified.update(marks)


def _absent(name: str, entry: Entry, error: OSError | None) -> DataError:
    """The one error for data that is not here: where it was looked for, what to fetch, where to put it."""
    looked = [f"  {folder}{'' if folder.is_dir() else ' (no such folder)'}" for folder in folders()]
    lines = [f"data set {name!r} is not here. Looked in DUBITO_DATA and the user's cache:", *looked]
    lines.append("for:" if len(entry.forms) == 1 else "for one of these forms:")
    lines += [f"  {' and '.join(file.path for file in form.files)}" for form in entry.forms]
    lines += _instructions(entry)
    if error is not None:
        lines.append(f"Downloading it failed: {error}")
    return DataError("\n".join(lines))


def _instructions(entry: Entry) -> Iterator[str]:
    offered = next((form for form in entry.forms if all(file.url for file in form.files)), None)
    place = cache_folder()
    if offered is not None:
        yield "Download and put in place, there or below any folder of DUBITO_DATA:"
        for file in offered.files:
            yield f"  {file.url}\n    -> {place / file.path}"
        return
    yield f"No publisher offers it in this form; it was prepared from: {entry.source}."
    yield "Put the prepared files in place, there or below any folder of DUBITO_DATA:"
    for file in entry.forms[0].files:
        yield f"  {place / file.path} ({file.size} bytes, sha256 {file.sha256})"


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One row of the list of data sets.

    Attributes:
        name: what `load` knows it by.
        task: what its targets are.
        rows: rows of all parts, in the form that is present or else the fullest; of a synthetic set, the
            paper's points.
        licence: what is known of its licence.
        present: whether it can be loaded without a download; files are looked for, not yet checked.
    """

    name: str
    task: TaskKind
    rows: int
    licence: str
    present: bool


def listing() -> list[Listed]:
    """Every named data set, in order: name, task, rows, licence, present or not."""
    return [_listed(name, entry) for name, entry in ENTRIES.items()]


def _listed(name: str, entry: Entry) -> Listed:
    if not entry.forms:
        present = entry.module is None or find_spec(entry.module) is not None
        rows = entry.rows
    else:
        here = next((form for form in entry.forms if _paths(form)), None)
        present, rows = here is not None, (here or entry.forms[0]).rows
    return Listed(name=name, task=entry.task, rows=rows, licence=entry.licence, present=present)

"""Data folders of a test's own: nothing on the machine is read or written."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder of DUBITO_DATA; the cache lies beside it."""
    home = tmp_path / "home"
    for variable, path in (("HOME", home), ("XDG_CACHE_HOME", home / "cache"), ("LOCALAPPDATA", home / "local")):
        monkeypatch.setenv(variable, str(path))
    given = tmp_path / "given"
    given.mkdir()
    monkeypatch.setenv("DUBITO_DATA", os.pathsep.join([str(tmp_path / "missing"), str(given)]))
    return given

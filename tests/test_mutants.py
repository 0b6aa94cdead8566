"""The list of planted bugs fits the tree: texts are there exactly once, tests exist, every room has one."""

import ast
from functools import cache
from pathlib import Path

import pytest

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "dubito"
#: Modules that compute nothing a test could find wrong (settings of the process, names, tables, versions), and the
#: experiments of papers, whose numbers are judged against those published.
WITHOUT = {
    "allocator",
    "errors",
    "factors",
    "jobs",
    "lazy",
    "notebook",
    "registry",
    "summary",
    "version",
    "__init__",
    "__main__",
    "reproduce",
}


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.room}: {mutant.sentence}")
def test_bugs_can_be_planted_and_their_tests_exist(mutant: Mutant):
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    planted = mutant.planted(text)
    assert planted != text
    ast.parse(planted)
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert name.partition("[")[0] in functions_of(ROOT / path), test


def test_a_text_that_is_gone_is_named():
    lost = Mutant("src/dubito/file.py", "a + b", "a - b", (), "a sum is a difference")
    for text in ("", "a + b; a + b"):
        with pytest.raises(ValueError, match=r"a sum is a difference.*file\.py"):
            lost.planted(text)


def test_every_room_has_a_bug():
    def parts(folder: Path) -> set[str]:
        return {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}

    rooms = parts(PACKAGE) - WITHOUT - {"inference"}
    methods = {f"inference/{name}" for name in parts(PACKAGE / "inference") - WITHOUT}
    planted = {mutant.room for mutant in MUTANTS}
    assert rooms | methods == planted, "every room needs a bug in tests/mutants/planted.py, and no other room"

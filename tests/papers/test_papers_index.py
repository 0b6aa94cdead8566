"""Tables by name: one is built at a time; the papers are found in a checkout and are no part of the package."""

import ast
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from dubito.cli import laboratory, main
from dubito.errors import ConfigError
from papers import index
from papers.runner import tables

ROOT = Path(__file__).parents[2]


def test_the_index_names_every_table_of_every_module_once():
    names = {}
    for path in sorted((ROOT / "papers").rglob("*.py")):
        if "TABLES = (" in path.read_text() and path.name != "index.py":
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            names |= {table.name: name for table in import_module(name).TABLES}
    assert names == index.TABLES
    assert list(tables()) == list(index.TABLES)
    assert all(table.name == name for name, table in tables().items())
    assert all(t.experiment.paper == index.TABLES[name].split(".")[1] for name, t in tables().items())


def loaded(*arguments: str) -> set[str]:
    """The papers' modules that a command imported."""
    code = (
        "import sys\nfrom dubito.cli import main\n"
        f"assert main({['reproduce', *arguments]!r}) == 0\n"
        "print('LOADED', *(name for name in sys.modules if name.startswith('papers.')))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def experiments(modules: set[str]) -> set[str]:
    return {name for name in modules if not name.startswith(("papers.runner", "papers.index", "papers.settings"))}


def test_looking_up_one_table_imports_one_table():
    names = experiments(loaded("bali-table-1", "--show", "--json"))
    modules = ["baselines", "choice", "columns", "dropout", "ivon", "layerwise", "pbp", "printed", "replicas", "stack"]
    wanted = {f"papers.bali.uci.{name}" for name in [*modules, "tables_1_7"]}
    assert names == {"papers.bali", "papers.bali.uci"} | wanted
    assert experiments(loaded("inf-table-3", "--show")) == {"papers.inf", "papers.inf.table_3"}
    assert experiments(loaded("implicit-figure-3", "--show")) == {
        "papers.implicit",
        "papers.implicit.fashion",
        "papers.implicit.figure_3",
    }


def test_names_alone_import_no_table():
    code = "import sys, papers.runner as r; list(r.tables()); print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert experiments({name for name in done.stdout.split() if name.startswith("papers.")}) == set()


# -- where they are ---------------------------------------------------------------------------------------------


def checkout(folder: Path) -> Path:
    (folder / "papers" / "runner").mkdir(parents=True)
    (folder / "papers" / "runner" / "experiment.py").touch()
    return folder / "papers"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """As if the package were installed without its source."""
    monkeypatch.delenv(laboratory.VARIABLE, raising=False)
    monkeypatch.setattr(laboratory, "__file__", str(tmp_path / "site" / "dubito" / "cli" / "laboratory.py"))
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    return tmp_path


def test_the_papers_are_found_beside_the_source(monkeypatch, tmp_path):
    monkeypatch.delenv(laboratory.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert laboratory.papers_folder() == ROOT / "papers"


def test_the_papers_are_found_in_the_current_folder_and_those_above(installed):
    wanted = checkout(installed / "here")
    assert laboratory.papers_folder() == wanted


def test_the_variable_comes_first_and_takes_the_folder_or_its_checkout(installed, monkeypatch):
    checkout(installed / "here")
    other = checkout(installed / "other")
    for named in (other, other.parent):
        monkeypatch.setenv(laboratory.VARIABLE, str(named))
        assert laboratory.papers_folder() == other
    monkeypatch.setenv(laboratory.VARIABLE, str(installed / "nothing"))
    with pytest.raises(ConfigError, match=r"DUBITO_PAPERS must name the folder papers of a checkout.*nothing"):
        laboratory.papers_folder()


def test_without_a_checkout_the_command_says_where_to_get_it(installed, capsys):
    (installed / "here" / "papers").mkdir()  # somebody's articles
    assert main(["reproduce", "--list"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "no part of the installed package; clone dubito's repository" in said
    assert "DUBITO_PAPERS" in said


# -- what is shipped --------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_alone():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"] == {"packages": ["src/dubito"]}
    assert "force-include" not in build and "include" not in build
    assert "papers" in build["targets"]["sdist"]["include"]
    assert not (ROOT / "src" / "dubito" / "reproduce").exists()
    assert not [path for path in (ROOT / "src").rglob("*") if path.name in ("papers", "results")]


def test_the_package_imports_no_papers():
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not any(name.split(".")[0] == "papers" for name in names), path


def test_papers_do_not_import_each_other():
    """A paper knows the runner and the settings; what two papers share stands there."""
    folders = {name.split(".")[1] for name in index.TABLES.values()}
    for path in (ROOT / "papers").rglob("*.py"):
        paper = path.relative_to(ROOT / "papers").parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level or paper not in folders | {"runner"}:
                continue
            package = path.relative_to(ROOT).parts[:-1]
            target = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            reached = {target[1]} if len(target) > 1 and target[1] else {alias.name for alias in node.names}
            assert not reached & (folders - {paper}), f"{path} imports {reached}"

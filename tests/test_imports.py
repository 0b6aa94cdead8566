"""Imports flow one way, `import dubito` stays light, and nothing in the source opens pickles or names a device."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "dubito"

#: The rooms from first to last: a room imports from the levels before its own, and from itself.
CORE = (
    ("errors", "version", "allocator", "lazy", "devices", "notebook"),
    ("hints", "seeds", "processes", "jobs", "precision"),
    ("metrics",),
    ("prediction", "summary", "storage", "distributions"),
    ("inputs", "fingerprints", "priors"),
    ("sources", "likelihoods", "layers", "evaluation"),
    ("networks",),
    ("fitting",),
    ("draws",),
    ("curvature", "posterior"),
    ("training", "optim", "matrices"),
    ("objective", "noise_check"),
    ("calibration", "method", "diagnostics"),
    ("weight_normals",),
    ("node_factors",),
    ("inference", "factors"),
    ("protocol",),
    ("export",),
    ("loading",),
)
PUBLIC = ("dubito",)  # `__init__.py`, the public names, which open what lies before them when asked
BEYOND = (
    ("registry",),
    ("data", "models", "selfcheck"),
    ("shifts", "active", "integrations"),
    ("compare",),
    ("plot",),
    ("report",),
    ("cli",),
    ("__main__",),
)
LEVELS = {room: level for level, rooms in enumerate((*CORE, PUBLIC, *BEYOND)) for room in rooms}
INNER = {room for rooms in CORE for room in rooms}

MODULES = sorted(SOURCE.rglob("*.py"))
every_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))


def room_of(path: Path) -> str:
    """The room a file belongs to: a module or folder right under the package."""
    first = path.relative_to(SOURCE).parts[0]
    return "dubito" if first == "__init__.py" else first.removesuffix(".py")


def test_the_page_lists_the_rooms_in_their_order() -> None:
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = page.split("## Rooms and the direction of imports")[1].split("```")[1].strip()
    core, beyond = (part.strip().splitlines() for part in re.split(r"\n-- .* --\n", block))
    for lines, levels in ((core, CORE), (beyond, BEYOND[:-1])):
        assert len(lines) == len(levels)
        for line, rooms in zip(lines, levels, strict=True):
            listed = re.findall(r"[a-z_]+", line)[: len(rooms)]
            assert sorted(listed) == sorted(rooms)


def is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that can run: those under `if TYPE_CHECKING` never do."""
    for node in ast.iter_child_nodes(tree):
        if is_typing_only(node):
            continue
        yield node
        yield from running(node)


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """The modules of the package that a file imports, anywhere in it, as parts below the package.

    What is imported for types alone counts too: who reads a file must know what it names. The public names are the
    exception: rooms that open later are named there for type checkers.
    """
    package = ["dubito", *path.relative_to(SOURCE).parts[:-1]]
    tree = ast.parse(path.read_text())
    for node in running(tree) if room_of(path) == "dubito" else ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for first, *rest in names:
            if first == "dubito":
                yield tuple(rest)


def rooms_of(parts: tuple[str, ...]) -> str:
    """The room an import reaches; a name that is no room is one of the public names."""
    known = parts and ((SOURCE / parts[0]).is_dir() or (SOURCE / f"{parts[0]}.py").is_file())
    return parts[0] if known else "dubito"


def test_every_room_has_its_level():
    rooms = {room_of(path) for path in MODULES}
    assert rooms <= set(LEVELS), f"give these rooms a level: {rooms - set(LEVELS)}"
    assert set(LEVELS) <= rooms, f"these rooms are gone: {set(LEVELS) - rooms}"
    assert len(LEVELS) == sum(map(len, (*CORE, PUBLIC, *BEYOND)))  # no room stands twice


@every_module
def test_imports_come_from_earlier_rooms(path: Path):
    room = room_of(path)
    for parts in imported(path):
        source = rooms_of(parts)
        allowed = source == room or LEVELS[source] < LEVELS[room]
        assert allowed, f"{room} imports {source}, which comes after it or stands beside it"
        if room in INNER:
            assert source in INNER, f"{room} is of the core, {source} is not"


@every_module
def test_methods_do_not_import_each_other(path: Path):
    """A method's room knows no other method, but for the point estimate that others start from."""
    if room_of(path) != "inference":
        return
    own = path.relative_to(SOURCE / "inference").parts[0].removesuffix(".py")
    for parts in imported(path):
        if parts[:1] == ("inference",) and len(parts) > 1:
            assert parts[1] in (own, "map"), f"{own} imports the method {parts[1]}"


def test_the_checks_see_what_they_should(tmp_path, monkeypatch):
    """The rules on a package made to break them."""
    (tmp_path / "inference").mkdir()
    texts = {
        "seeds.py": "def late():\n    from .posterior import x\n",
        "posterior.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .loading import load\n",
        "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import seeds\n",
        "loading.py": "import dubito\nfrom dubito.posterior import x\nfrom dubito import seeds, methods\n",
        "inference/a.py": "from .b import B\nfrom ..seeds import x\nfrom . import b\n",
        "inference/b.py": "import torch\nfrom .. import seeds\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    found = {name: [rooms_of(parts) for parts in imported(tmp_path / name)] for name in texts}
    assert found == {
        "seeds.py": ["posterior"],
        "posterior.py": ["loading"],
        "__init__.py": [],
        "loading.py": ["dubito", "posterior", "seeds", "dubito"],
        "inference/a.py": ["inference", "seeds", "inference"],
        "inference/b.py": ["seeds"],
    }
    for broken in ("seeds.py", "posterior.py", "loading.py"):
        with pytest.raises(AssertionError):
            test_imports_come_from_earlier_rooms(tmp_path / broken)
    with pytest.raises(AssertionError):
        test_methods_do_not_import_each_other(tmp_path / "inference" / "a.py")
    test_methods_do_not_import_each_other(tmp_path / "inference" / "b.py")


HEAVY = (
    "torchmetrics",
    "sklearn",
    "scipy",
    "pandas",
    "matplotlib",
    "pyarrow",
    "torchvision",
    "transformers",
    "lightning",
)


def test_import_dubito_is_light():
    code = (
        "import sys, torch, numpy\n"
        "before = set(sys.modules)\n"
        "import dubito\n"
        "dubito.Laplace\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        f"heavy = sorted(new & set({HEAVY!r}))\n"
        "beyond = sorted(name for name in sys.modules if name.startswith('dubito.'))\n"
        "print(heavy, *beyond, sep='\\n')\n"
    )
    heavy, *modules = run_code(code).splitlines()
    assert heavy == "[]"
    assert {name.split(".")[1] for name in modules} <= INNER  # what lies beyond the core is not loaded


def forbidden(tree: ast.AST) -> Iterator[str]:
    """Calls and imports that would run code of a file, or tie the library to one device."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            if {"pickle", "cloudpickle", "dill", "shelve", "marshal"} & {name.split(".")[0] for name in names}:
                yield ast.unparse(node)
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text in ("torch.save", "torch.load", "joblib.dump", "joblib.load") or "pickle" in node.attr.lower():
                yield text
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield "allow_pickle"
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
                yield ast.unparse(node)
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec", "compile", "__import__"):
                yield ast.unparse(node)


@every_module
def test_no_pickle_no_fixed_device(path: Path):
    assert list(forbidden(ast.parse(path.read_text()))) == []


def test_no_text_of_it_either():
    """Words that no comment or string needs."""
    for path in MODULES:
        for words in (".cuda(", "torch.save", "torch.load", "import pickle"):
            assert words not in path.read_text(), f"{words} in {path}"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "torch.save(x, y)",
        "torch.load(y, weights_only=True)",
        "net.cuda()",
        "x.to(0).cuda(non_blocking=True)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "pd.read_pickle(path)",
        "joblib.load(path)",
        "eval(text)",
    ],
)
def test_the_check_finds_what_it_forbids(text: str):
    assert list(forbidden(ast.parse(text)))


@pytest.mark.parametrize("text", ["net.eval()", "torch.cuda.is_available()", "np.load(path, allow_pickle=False)"])
def test_the_check_lets_the_rest_pass(text: str):
    assert not list(forbidden(ast.parse(text)))


def run_code(code: str) -> str:
    """What some code prints in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rooms_open_when_they_are_asked_for():
    """`import dubito` is enough for `dubito.data.load`, and does not load it."""
    run_code(
        "import sys, dubito\n"
        "early = [name for name in sys.modules if name.startswith('dubito.')]\n"
        "assert early == ['dubito.lazy'], early\n"
        "assert {*dubito._ROOMS, *dubito.__all__} <= set(dir(dubito))\n"
        "for name in dubito._ROOMS:\n"
        "    assert getattr(dubito, name).__name__ == f'dubito.{name}'\n"
        "for name in dubito.__all__:\n"
        "    assert getattr(dubito, name) is not None\n"
        "assert dubito.posterior.Posterior and not hasattr(dubito, 'dta') and not hasattr(dubito, '_x')\n"
    )


@pytest.mark.parametrize("package", ["dubito", "dubito.data"])
def test_what_type_checkers_read_is_what_opens(package: str):
    module = import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    block = next(node for node in tree.body if is_typing_only(node))
    named = {
        (node.module or "", alias.name)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    opened = {(where, name) for where, names in module._NAMES.items() for name in names}
    assert named == opened | {("", room) for room in getattr(module, "_ROOMS", ())}


@pytest.mark.parametrize(
    "work",
    [
        "from dubito.cli import main; main(['--help'])",
        "from dubito.cli import main; main(['compare', '--help'])",
        "from dubito.cli import main; main(['data', 'list'])",
        "from dubito.cli.common import method_names, data_names; assert len(method_names() + data_names()) > 30",
        "from dubito.cli import make_parser; from dubito.cli.completion import answer; answer(make_parser())",
    ],
)
def test_what_computes_nothing_does_without_pytorch(work: str):
    code = f"import sys\ntry:\n    {work}\nexcept SystemExit as end:\n    assert not end.code\n"
    assert run_code(f"{code}print('torch' in sys.modules)").endswith("False\n")
    assert run_code("import sys, dubito\ndubito.MAP\nprint('torch' in sys.modules)") == "True\n"


def test_the_first_console_leaves_pythons_generator_as_it_was():
    """rich draws from it when it is imported."""
    code = (
        "import random, sys; from dubito.lazy import rich_console; random.seed(0); state = random.getstate(); "
        "rich_console(); assert 'rich.console' in sys.modules and random.getstate() == state"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

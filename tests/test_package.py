"""The package as others get it: its wheel, with any of the extras missing, and the papers that come with a release."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

from dubito import __version__
from tests.matrix.__main__ import floors

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OWNERS = packages_distributions()

#: By package that an extra brings, a line that needs it: without it, the error must name such an extra.
NEEDS = {
    "argcomplete": "command('completion', 'bash')",
    "distributed": "with dubito.jobs.cluster('dask', None): pass",
    "joblib": "dubito.jobs.load_joblib()",
    "matplotlib": "dubito.plot.std_map(torch.ones(2, 2))",
    "optuna": "command('compare', 'wine', '--methods', 'map', '--tune', '2', '--steps', '2', '--out', 'tuned')",
    "pandas": "prediction.to_pandas()",
    "pyarrow": "command('predict', 'posterior.safetensors', 'rows.csv', '--out', 'rows.parquet')",
    "pyro": "dubito.HMC(num_samples=4).fit(net, data, Categorical())",
    "ray": "with dubito.jobs.cluster('ray', None): pass",
    "scipy": "dubito.shifts.svhn.read(Path('test_32x32.mat'))",
    "sklearn": "dubito.data.load('digits')",
    "tensorboard": "dubito.integrations.TensorBoard('runs')",
}

#: In a process of its own, one child per hidden package, so that PyTorch is imported once.
SCRIPT = """
import contextlib, io, os, sys, traceback
from importlib.abc import MetaPathFinder
from pathlib import Path

import torch
import torch._dynamo  # what the first backward pass and optimiser would import in every child

torch.set_num_threads(1)
early = set(sys.modules)


class Hiding(MetaPathFinder):
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)


def command(*words):
    from dubito.cli import main

    with contextlib.redirect_stderr(io.StringIO()) as text, contextlib.redirect_stdout(text):
        try:
            code = main([*words])
        except SystemExit as end:
            code = end.code
    if code:
        raise dubito.ConfigError(text.getvalue())
    return text.getvalue()


def everyday():
    global dubito, data, net, Categorical, prediction
    import dubito
    from dubito import Categorical

    assert str(Path(dubito.__file__).parents[1]) == WHEEL, dubito.__file__
    data = torch.randn(30, 3), torch.arange(30) % 2
    net = torch.nn.Linear(3, 2)
    posterior = dubito.Laplace().fit(net, data, Categorical())
    posterior.save("posterior.safetensors")
    prediction = dubito.load("posterior.safetensors", net).predict(data[0])
    assert prediction.probs.shape == (30, 2)
    assert dubito.MAP().fit(net, data, Categorical(), training=dubito.Training(epochs=2)).evaluate(data)
    assert "compare" in command("--help") and "digits" in command("data", "list")


for package, line, extras in CASES:
    hidden = set(package.split())
    assert not hidden & early, hidden & early
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1]:
            print(f"without {package}", flush=True)
        continue
    try:
        sys.meta_path[:] = map(Hiding, sys.meta_path)
        everyday()
        if line:
            try:
                exec(line)
            except dubito.DubitoError as error:
                assert any(f"pip install 'dubito[{extra}]'" in str(error) for extra in extras), error
            else:
                raise AssertionError(f"{line} did without {package}")
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(1)
    os._exit(0)
"""


def distributions(extra: str) -> set[str]:
    """What an extra installs by name, those of the extras that it names included."""
    listed: set[str] = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        name = re.match(r"[\w.-]+", requirement)
        if inner := re.match(r"dubito\[([\w,-]+)\]", requirement):
            listed |= {package for part in inner[1].split(",") for package in distributions(part)}
        elif name:
            listed.add(name[0].lower())
    return listed


def modules(names: set[str]) -> set[str]:
    """The modules of packages, where these are installed here."""
    return {module for module, owners in OWNERS.items() if names & {*map(str.lower, owners)}}


def extras_with(package: str) -> list[str]:
    """The extras that bring a package; SciPy comes with scikit-learn, and Dask's extra brings `distributed`."""
    names = {"scipy": ["scikit-learn"], "distributed": ["dask"], "ray": ["ray"]}.get(package)
    names = names or [name.lower() for name in OWNERS.get(package, [package])]
    return [extra for extra in PROJECT["optional-dependencies"] if distributions(extra) & {*names}]


def asked_for() -> set[str]:
    """The packages that the source imports or asks an extra for, beyond what every installation has."""
    required = {re.match(r"[\w.-]+", line)[0] for line in PROJECT["dependencies"]}  # pyright: ignore
    packages = set()
    for path in (ROOT / "src" / "dubito").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                packages |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                packages.add(node.module)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "require_extra":
                packages |= {part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)}
    packages = {name.partition(".")[0] for name in packages}
    return packages - required - sys.stdlib_module_names - {"dubito"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="builds the wheel: pip install 'dubito[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        told = message_from_bytes(archive.read(metadata))
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in source.rglob("*.*") if "__pycache__" not in path.parts}
    assert {name for name in names if name.startswith("dubito/")} == files
    assert {"dubito/py.typed"} <= files and not any(name.startswith(("tests", "papers")) for name in names)
    assert told["Version"] == __version__ and told["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in told.get_all("Classifier", [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="hides packages in children of one process")
def test_the_installed_wheel_works_with_any_extra_missing(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    extras = {extra for extra in PROJECT["optional-dependencies"] if extra not in ("all", "dev", "docs")}
    optional = modules({name for extra in extras for name in distributions(extra)})
    cases = [(package, NEEDS.get(package), extras_with(package)) for package in sorted(optional | {*NEEDS})]
    cases.append((" ".join(name for name, *_ in cases), None, []))
    code = f"WHEEL, CASES = {str(site)!r}, {cases!r}\n{SCRIPT}"
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_every_package_asked_for_comes_with_an_extra_and_has_its_line() -> None:
    assert asked_for() <= {*NEEDS}, "give the new package a line in NEEDS"
    assert {package for package in NEEDS if not extras_with(package)} == set()


def test_versions_of_the_release_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__ and citation["license"] == PROJECT["license"]
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "[Unreleased]" and headings[1].startswith(f"[{__version__}]")


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    kinds = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert {*kinds} <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_forms_can_be_read(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form.keys() == {"blank_issues_enabled"} or {"name", "description", "body"} <= form.keys()
    for part in form.get("body", []):
        assert part["type"] in ("checkboxes", "dropdown", "input", "markdown", "textarea") and part["attributes"]


def test_the_page_of_compatibility_names_the_floors() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    declared = [tuple(line.split(">=")) for line in (f"Python{PROJECT['requires-python']}", *PROJECT["dependencies"])]
    assert listed == declared


def test_the_oldest_packages_are_the_floors_of_all_requirements() -> None:
    extras = {"cli": ["scikit-learn>=1.7", "dubito[hf]"], "report": ["scikit-learn>=1.10", "dask[a,b]>=2024.8"]}
    project = {"dependencies": ["torch>=2.6", "numpy>=1.26,<3"], "optional-dependencies": extras}
    lowest = {"torch": "2.6", "numpy": "1.26", "scikit-learn": "1.10", "dask": "2024.8"}
    assert floors(project) == lowest
    assert floors(PROJECT).keys() >= {"torch", "numpy", "pandas", "pytest"}

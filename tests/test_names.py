"""Names: one word for one thing, and nouns of the field for variables."""

import ast
from collections import defaultdict
from pathlib import Path

import dubito

SOURCE = Path(dubito.__file__).parent

#: Names that two classes may share, and why.
SHARED = {
    "NoisyAdam": "the paper's optimiser for loops of one's own, and the method that trains with it",
    "NoisyKFAC": "the paper's optimiser for loops of one's own, and the method that trains with it",
    "VOGN": "the paper's optimiser for loops of one's own, and the method that trains with it",
    "Vadam": "the paper's optimiser for loops of one's own, and the method that trains with it",
    "Block": "of a residual network in models, as its paper says; a weight with its bias as matrices elsewhere",
    "Network": "what compare trains; a type variable in models",
    "Reader": "of new rows' files in compare; a type variable in layers",
    "Task": "of a comparison, and the literal of what data ask for in data",
    "State": "of a loop in active, of a recurrent layer in layers",
    "Part": "rows of a data set in data, of a parameter in layers",
    "Form": "of a stored data set in data, of a use of a weight in layers",
    "Point": "of a learning curve in active, a law of node factors",
    "Settings": "of a comparison in compare, of a recurrent function in layers",
    "Kept": "a stored row in compare, a type variable in calibration",
}


def parsed() -> dict[str, ast.Module]:
    """Every module of the package, by its path in it."""
    return {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    }


def types_of(tree: ast.Module) -> list[str]:
    """Names of a module's classes, of aliases of types and of type variables, without leading underscores."""
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if not name.isupper() and name.lstrip("_")[:1].isupper():
                names.append(name)
    return [name.lstrip("_") for name in names]


def test_no_two_classes_share_a_name() -> None:
    modules = defaultdict(list)
    for path, tree in parsed().items():
        for name in types_of(tree):
            modules[name].append(path)
    shared = {name: paths for name, paths in modules.items() if len(paths) > 1}
    assert {name: paths for name, paths in shared.items() if name not in SHARED} == {}
    assert SHARED.keys() <= shared.keys(), "names that no two classes share any longer leave the list"

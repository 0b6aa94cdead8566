"""Names: one word for one thing, and nouns of the field for variables."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import dubito

SOURCE = Path(dubito.__file__).parent

#: Names that two classes may share, and why.
SHARED = {
    "NoisyAdam": "the paper's optimiser for loops of one's own, and the method that trains with it",
    "NoisyKFAC": "the paper's optimiser for loops of one's own, and the method that trains with it",
    "VOGN": "the paper's optimiser for loops of one's own, and the method that trains with it",
    "Vadam": "the paper's optimiser for loops of one's own, and the method that trains with it",
    "Part": "rows of a data set in data, of a parameter in layers",
    "Settings": "of a comparison in compare, of a recurrent function in layers",
}


#: Pronouns and participles, which do not say what a variable holds.
NAMELESS = {"own", "found", "each", "one", "kept"}
#: Where a word of the list is the noun itself.
NOUNS = {("errors.py", "one"): "the number 1, which a fraction may reach or not"}


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


def bound(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that a module binds, with their lines: variables, arguments, attributes, imports under another name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name, node.lineno


def test_names_that_are_bound_are_seen() -> None:
    text = """
def f(own, *each, **kept): return lambda found: [one for one in own]
with f() as found: found.kept = (each := 1)
import own as one
match own:
    case [one, *each]: pass
"""
    assert sorted(name for name, _ in bound(ast.parse(text)) if name in NAMELESS) == (
        ["each"] * 3 + ["found"] * 2 + ["kept"] * 2 + ["one"] * 3 + ["own"]
    )


def test_variables_are_named_after_what_they_hold() -> None:
    nameless = [
        f"{path}:{line}: {name}"
        for path, tree in parsed().items()
        for name, line in bound(tree)
        if name in NAMELESS and (path, name) not in NOUNS
    ]
    assert nameless == []

"""PyTorch's own list of modules, each with parameters as a network of its own through every method.

`python -m tests.layers.module_db` writes the table of `docs/modules.md`, which the tests compare.
"""

import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils._pytree import tree_flatten, tree_unflatten

import dubito
from dubito import DeepEnsemble, DubitoError, Gaussian, Training

PAGE = Path(__file__).parents[2] / "docs" / "modules.md"
ROWS, TRIES = 6, 80
QUICK = Training(epochs=1, batch_size=ROWS, lr=1e-3)
METHODS = {**dubito.methods(), "deep-ensemble": DeepEnsemble(members=2)}
VERSION = torch.__version__.split("+")[0]
#: Methods whose posteriors are one set of weights.
POINTS = ("map", "swa")
WHOLE, PART, REFUSED = "all", "part", "no"


class AsNetwork(nn.Module):
    """A module as a network: from rows of tensors to rows of numbers.

    Args:
        module: what is tried.
        tree: how its arguments are made of tensors.
        others: the arguments that are none, by their place.
        axis: where the module has its rows.
    """

    def __init__(self, module: nn.Module, tree: Any, others: dict[int, Any], axis: int) -> None:
        super().__init__()
        self.module, self.tree, self.others, self.axis = module, tree, others, axis

    def forward(self, *tensors: Tensor) -> Tensor:
        given, leaves = (tensor.transpose(0, self.axis) for tensor in tensors), []
        for place in range(self.tree.num_leaves):
            leaves.append(self.others[place] if place in self.others else next(given))
        args, kwargs = tree_unflatten(leaves, self.tree)
        outputs = self.module(*args, **kwargs)
        while not isinstance(outputs, Tensor):
            outputs = outputs[0]
        outputs = outputs.transpose(0, self.axis)
        return outputs.reshape(len(outputs), -1)


class Sample(NamedTuple):
    """A network and rows for it."""

    network: AsNetwork
    inputs: tuple[Tensor, ...]


class Outcome(NamedTuple):
    """What became of a module under a method, and the reason where it is not treated whole."""

    word: str
    reason: str


@cache
def with_parameters() -> dict[str, ModuleInfo]:
    """The modules of the list that have parameters, by name."""
    modules = {}
    for info in module_db:
        with torch.random.fork_rng(devices=[]):
            first = next(samples(info))
        module = info.module_cls(*first.constructor_input.args, **first.constructor_input.kwargs)
        if next(module.parameters(), None) is not None:
            modules[info.name] = info
    return modules


def samples(info: ModuleInfo) -> Iterator[ModuleInput]:
    """The arguments that PyTorch tests a module with."""
    torch.manual_seed(0)
    made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=False)
    return iter(made)


@cache
def sample(name: str) -> Sample:
    """The first arguments of a module whose rows do not touch, as rows of a network."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _, given in zip(range(TRIES), samples(with_parameters()[name]), strict=False):
            torch.manual_seed(1)
            made = as_sample(with_parameters()[name].module_cls, given)
            if made is not None:
                return made
    raise AssertionError(f"none of the first arguments of {name} has rows that do not touch")


def as_sample(kind: type[nn.Module], given: ModuleInput) -> Sample | None:
    """A module's arguments as rows: its first or second axis, or some of the same arguments side by side."""
    module = kind(*given.constructor_input.args, **given.constructor_input.kwargs).eval()
    if hasattr(module, "reduction"):
        module.reduction = "none"  # a loss per row
    leaves, tree = tree_flatten((given.forward_input.args, given.forward_input.kwargs))
    others = {place: leaf for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    for axis, stacked in ((0, False), (0, True), (1, True), (1, False)):
        network = AsNetwork(module, tree, others, axis)
        rows = [tensor[None] if stacked else tensor for tensor in tensors]
        if any(tensor.ndim <= axis for tensor in rows):
            continue
        inputs = tuple(repeated(tensor if stacked else tensor.transpose(0, axis)) for tensor in rows)
        if any(is_lazy(parameter) for parameter in module.parameters()) or apart(network, inputs):
            return Sample(network, inputs)
    return None


def apart(network: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    """Whether each row is answered alone as it is among the others."""
    try:
        with torch.no_grad():
            outputs = network(*inputs)
            alone = [network(*(tensor[row : row + 1] for tensor in inputs)) for row in range(ROWS)]
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        return False
    same = len(outputs) == ROWS and outputs.is_floating_point()
    return same and torch.allclose(torch.cat(alone), outputs, atol=1e-5)


def repeated(tensor: Tensor) -> Tensor:
    """So many rows, those of numbers with a little noise."""
    rows = torch.cat([tensor] * (-(-ROWS // len(tensor))))[:ROWS]
    return rows + 0.1 * torch.randn_like(rows) if rows.is_floating_point() else rows


def tried(name: str, method: str) -> Outcome:
    """A module through a method: fit, predict, and what the summary says; errors of others pass."""
    network, inputs = sample(name)
    rows = inputs[0] if len(inputs) == 1 else inputs
    lazy = any(is_lazy(parameter) for parameter in network.parameters())
    with torch.no_grad():
        outputs = torch.zeros(ROWS, 1) if lazy else network(*inputs)
    targets = outputs + torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            posterior = METHODS[method].fit(network, (rows, targets), Gaussian(std=1.0), training=QUICK)
        except DubitoError as error:
            return Outcome(REFUSED, str(error))
        prediction = posterior.predict(rows, 2)
    assert prediction.mean.shape == outputs.shape and bool(prediction.mean.isfinite().all())  # pyright: ignore
    points = [row.holds for row in posterior.summary().rows if row.holds.startswith("point")]
    if not points or method in POINTS:
        return Outcome(WHOLE, "")
    assert all("(" in held for held in points), f"{name} under {method}: points without a reason"
    return Outcome(PART, points[0].removeprefix("point (").removesuffix(")"))


@cache
def outcomes(name: str) -> dict[str, Outcome]:
    """What became of a module under every method."""
    return {method: tried(name, method) for method in METHODS}


def line(name: str) -> str:
    """A module's row of the table."""
    return f"| {name} | {' | '.join(outcome.word for outcome in outcomes(name).values())} |"


def reasons() -> list[str]:
    """Why modules are refused, or some of their parameters are points: by reason, with modules and methods."""
    groups: dict[str, dict[str, list[str]]] = {}
    for name in with_parameters():
        for method, (word, reason) in outcomes(name).items():
            if word != WHOLE:
                short = re.split(r"; | \(|, but | and this network", re.sub(r" '[^']*'", "", reason))[0].rstrip(",")
                groups.setdefault(short, {}).setdefault(method, []).append(name)
    return [
        f"- *{reason}*. " + " ".join(f"{method}: {', '.join(names)}." for method, names in methods.items())
        for reason, methods in ((reason, grouped(methods)) for reason, methods in groups.items())
    ]


def grouped(methods: dict[str, list[str]]) -> dict[str, list[str]]:
    """Methods with the same modules under one name."""
    together: dict[tuple[str, ...], list[str]] = {}
    for method, names in methods.items():
        together.setdefault(tuple(names), []).append(method)
    return {", ".join(named): list(names) for names, named in together.items()}


def page() -> str:
    """The page with its table and reasons made anew."""
    head = f"| module | {' | '.join(METHODS)} |\n|{'---|' * (len(METHODS) + 1)}"
    before = PAGE.read_text(encoding="utf-8").split("<!-- table -->")[0]
    lines, why = "\n".join(line(name) for name in with_parameters()), "\n".join(reasons())
    return f"{before}<!-- table -->\n\nPyTorch {VERSION}:\n\n{head}\n{lines}\n\n## Why not\n\n{why}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

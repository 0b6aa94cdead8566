"""From a network to its blocks: which parameters can be covered, how, and why others cannot."""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .. import seeds
from ..errors import NetworkError
from ..inputs import Inputs, Place, call, count_rows, map_tensors, take
from ..layers.opened import batch_axis
from ..layers.ports import Role, Spec, is_opened, specs, tappable
from ..layers.shell import leased
from ..layers.taps import Link, Port, Tap, tapped
from ..layers.trace import Layout, trace, unnested
from .blocks import Block, diagonal_block

#: The largest side of a Kronecker factor: a wider one would not fit into memory nor be decomposed in time.
LARGEST_SIDE = 1 << 14


@dataclass(frozen=True, eq=False)
class Taps:
    """The taps behind blocks: what `statistics` reads.

    Attributes:
        blocks: by name.
        taps: the taps of each block, one for each of its weight's parts.
    """

    blocks: dict[str, Block]
    taps: dict[str, tuple[Tap, ...]]


@dataclass(frozen=True, eq=False)
class _Place:
    """One place that uses a parameter: as the weight or as the bias of what stands at a port."""

    port: Port
    spec: Spec
    role: Role


def find_blocks(
    network: nn.Module, inputs: Inputs, names: Collection[str]
) -> tuple[list[Block], Taps, dict[str, str]]:
    """The blocks that cover the named parameters, the taps behind them, and why other parameters are left out.

    A dry run on two rows compares each parameter's gradient with what its taps rebuild of it, so that a
    parameter which is also used elsewhere, or where rows touch each other, is left out and not got wrong.

    Args:
        network: in evaluation mode.
        inputs: a few rows.
        names: the parameters wanted.

    Raises:
        NetworkError: if no gradient reaches a layer, or if no parameter can be covered at all.
    """
    places, left_out = _places(network, inputs, names)
    single = {name: _taps(name, None, found) for name, found in places.items()}
    for name in _misread(network, single, inputs):
        left_out[name] = (
            "its layers do not tell its whole gradient: it is also used elsewhere, or rows touch there"
        )
        del places[name]
    if not places:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise NetworkError(f"the curvature needs a layer it can tap, found none ({reasons})")
    blocks, taps = {}, {}
    named = dict(network.named_parameters())
    joined: set[str] = set()
    for name, found in places.items():
        bias = _bias_of(name, found, places, network)
        own = _taps(name, bias, found)
        block = _block(name, bias, own, tuple(named[name].shape))
        if not block.kronecker:
            own, bias = _taps(name, None, found), None
        blocks[name], taps[name] = block, own
        joined |= {bias} if bias else set()
    chosen = [name for name in blocks if name not in joined]
    by_name = {blocks[name].name: blocks[name] for name in chosen}
    ordered = {name: left_out[name] for name in names if name in left_out}
    return list(by_name.values()), Taps(by_name, {blocks[name].name: taps[name] for name in chosen}), ordered


def _places(
    network: nn.Module, inputs: Inputs, names: Collection[str]
) -> tuple[dict[str, list[_Place]], dict[str, str]]:
    """Every place of a called layer that uses a named parameter, and why some parameters have none."""
    modules = {path: module for path, module in network.named_modules() if tappable(module)}
    visits = trace(network, inputs, modules)
    firsts = _first_arguments(network, inputs, [path for path in visits if is_opened(modules[path])])
    known = {id(parameter): name for name, parameter in network.named_parameters()}
    places: dict[str, list[_Place]] = {}
    left_out: dict[str, str] = {}
    for path, visit in visits.items():
        module = modules[path]
        found: list[Spec] | str = specs(module)
        layout: Layout | str = visit.layout
        if is_opened(module):
            layout = _inner_layout(module, visit.layout, *firsts[path])
        elif layout is Layout.UNKNOWN:
            layout = "which axis of its layer's inputs holds the rows cannot be told"
        elif layout is Layout.SECOND and not isinstance(found, str) and not _trailing(found):
            layout = "its layer's inputs hold the rows where channels should be"
        reason = next((answer for answer in (found, layout) if isinstance(answer, str)), None)
        for parameter in module.parameters():  # an attention's projection at the end is a layer inside it
            if reason is not None and id(parameter) in known:
                left_out.setdefault(known[id(parameter)], reason)
        if isinstance(found, str) or isinstance(layout, str):
            continue
        for spec in found:
            port = Port(path, spec.key, layout)
            for role in (spec.weight, spec.bias):
                if role is not None and id(role.tensor) in known:
                    places.setdefault(known[id(role.tensor)], []).append(_Place(port, spec, role))
    for name in names:
        if name not in left_out and name not in places:
            left_out[name] = _why_not(network, name, modules, visits)
        elif name not in left_out and len({place.role.parts for place in places[name]}) > 1:
            left_out[name] = "it is used whole in one layer and in parts in another"
    return {name: places[name] for name in names if name not in left_out}, left_out


def _trailing(found: list[Spec]) -> bool:
    return all(role.use.trailing for spec in found for role in (spec.weight, spec.bias) if role is not None)


def _inner_layout(module: nn.Module, layout: Layout, first: Any, rows: int) -> Layout | str:
    """Where the products inside an opened layer hold the rows: its cases stand on their first axis."""
    if isinstance(first, PackedSequence):
        if int(first.batch_sizes[0]) == rows:
            return Layout.ROWS
        return "its layer reads packed sequences that are not one for each row"
    axes = 2 if isinstance(module, nn.RNNCellBase) else 3
    if not isinstance(first, Tensor) or first.ndim != axes:
        return "its layer reads inputs without an axis of cases"
    if layout is Layout.UNKNOWN:
        return "which axis of its layer's inputs holds the rows cannot be told"
    if batch_axis(module) == 1:
        return Layout.ROWS if layout is Layout.SECOND else "its layer runs over the axis that holds the rows"
    return layout if layout is not Layout.SECOND else "its layer runs over the axis that holds the rows"


def _why_not(network: nn.Module, name: str, modules: dict[str, nn.Module], visits: dict[str, Any]) -> str:
    """Why a parameter has no place."""
    path, _, own = name.rpartition(".")
    module = network.get_submodule(path)
    if "parametrizations" in path.split("."):
        return "a parametrisation computes the weight from it"
    if path in modules and path not in visits:
        return f"its layer ({type(module).__name__}) was not called"
    if path in modules:
        return f"there is no rule for {own!r} of {type(module).__name__}"
    return f"there is no rule for {type(module).__name__}"


def _first_arguments(network: nn.Module, inputs: Inputs, paths: list[str]) -> dict[str, tuple[Any, int]]:
    """What the modules read first, and the rows of the run that showed it."""
    firsts: dict[str, tuple[Any, int]] = {}
    if not paths:
        return firsts
    few = take(inputs, slice(3))
    rows = count_rows(few)

    def hook(path: str):
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            first = args[0] if args else kwargs.get("query", kwargs.get("input"))
            firsts[path] = (first, rows)

        return record

    with leased(network) as shell, ExitStack() as hooks:
        for path in paths:
            module = shell.get_submodule(path)
            hooks.enter_context(module.register_forward_pre_hook(hook(path), with_kwargs=True))
        with torch.no_grad(), unnested(shell), seeds.forked(0, "trace", device=Place.of(network).device):
            call(shell, few)
    return firsts


def _taps(name: str, bias: str | None, places: list[_Place]) -> tuple[Tap, ...]:
    """The taps of a parameter's parts, with a bias as their last column."""
    parts = places[0].role.parts
    links: list[list[Link]] = [[] for _ in range(parts)]
    for place in places:
        links[place.role.part].append(Link(place.port, place.role.use, place.spec.bias is not None))
    return tuple(Tap(name, bias, tuple(own), part, parts) for part, own in enumerate(links))


def _bias_of(
    name: str, found: list[_Place], places: dict[str, list[_Place]], network: nn.Module
) -> str | None:
    """The bias that can be the last column of a weight: both are used together, wherever the bias is used."""
    if any(place.role is not place.spec.weight for place in found):
        return None
    ids = {id(parameter): own for own, parameter in network.named_parameters()}
    biases = {ids.get(id(place.spec.bias.tensor)) for place in found if place.spec.bias is not None}
    bias = biases.pop() if len(biases) == 1 else None
    if bias is None or bias not in places:
        return None
    for place in places[bias]:
        weight = place.spec.weight
        together = place.role is place.spec.bias and weight is not None
        if not together or ids.get(id(weight.tensor)) != name:  # pyright: ignore
            return None
        if (place.role.part, place.role.parts) != (weight.part, weight.parts):  # pyright: ignore
            return None
    return bias


def _block(name: str, bias: str | None, taps: tuple[Tap, ...], shape: tuple[int, ...]) -> Block:
    product = taps[0].product
    if product is None or any(tap.product is None for tap in taps):
        return diagonal_block(name, shape)
    columns = product.columns + (bias is not None)
    if max(product.rows, columns) > LARGEST_SIDE:
        return diagonal_block(name, shape)
    path, _, own = name.rpartition(".")
    return Block(
        name=path if own == "weight" and path else name,
        weight=name,
        bias=bias,
        shape=shape,
        groups=product.groups * len(taps),
        rows=product.rows,
        columns=columns,
        kronecker=True,
    )


# -- the dry run --------------------------------------------------------------------------------------------------


def _misread(network: nn.Module, taps: dict[str, tuple[Tap, ...]], inputs: Inputs) -> list[str]:
    """The parameters whose gradient, for the first of two rows, is not what their taps rebuild of it."""
    few = map_tensors(Tensor.detach, take(inputs, slice(2)))
    rows = count_rows(few)
    device = Place.of(network).device
    named = dict(network.named_parameters())

    def seed(outputs: Tensor) -> Tensor:
        """Gradients at the outputs of the first row alone."""
        generator = seeds.generator(0, "dry run", device=outputs.device)
        noise = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype, device=outputs.device)
        return noise.masked_fill_(
            torch.arange(rows, device=device).reshape(-1, *[1] * (noise.ndim - 1)) > 0, 0
        )

    leaves = {name: named[name].detach().requires_grad_() for name in taps}
    wanted = list(leaves.values())
    # cuDNN's recurrent layers have no backward pass in evaluation mode.
    with (
        leased(network, leaves, detached=True) as shell,
        torch.enable_grad(),
        torch.backends.cudnn.flags(enabled=False),
    ):
        with unnested(shell), seeds.forked(0, "dry run", device=device):
            outputs = call(shell, few)
        if outputs.requires_grad:
            expected = torch.autograd.grad(outputs, wanted, seed(outputs), allow_unused=True)
        else:
            expected = [None] * len(wanted)
    ports = {id(link.port): link.port for each in taps.values() for tap in each for link in tap.links}
    with (
        torch.enable_grad(),
        leased(network, detached=True) as shell,
        tapped(shell, ports.values()),
        seeds.forked(0, "dry run", device=device),
    ):
        outputs = call(shell, few)
        if outputs.requires_grad:
            outputs.backward(seed(outputs))
        unreached = [name for name, each in taps.items() if not any(tap.seen() for tap in each)]
        if unreached:
            raise NetworkError(
                f"the curvature needs gradients of the outputs at every layer, but none reach "
                f"{', '.join(unreached)}: the network cuts the graph there (torch.no_grad, detach) or does "
                "not use these layers; leave them out with subset= or set requires_grad=False on them"
            )
        with torch.no_grad():
            largest = max((float(g.norm()) for g in expected if g is not None), default=0.0)
            return [
                name
                for (name, each), truth in zip(taps.items(), expected, strict=True)
                if not _agrees(each, truth, rows, largest)
            ]


def _agrees(taps: tuple[Tap, ...], truth: Tensor | None, rows: int, largest: float) -> bool:
    own = torch.cat([tap.gradients(rows, slice(0, 1)).flatten() for tap in taps])
    truth = torch.zeros_like(own) if truth is None else truth.flatten()
    eps = torch.finfo(truth.dtype).eps
    # Two ways to the same gradient differ by rounding; a missed use of the parameter is no rounding. Some
    # gradients are zero but for rounding (an attention's key bias), so the largest of all sets the scale too.
    return float((own - truth).norm()) <= 3 * eps**0.5 * float(truth.norm()) + 100 * eps * largest

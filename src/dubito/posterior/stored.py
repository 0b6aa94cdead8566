"""What a file may say of a posterior: facts against their types, tensors against the network's shapes, one draw."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from ..errors import StorageError
from ..layers import Survey, Use
from ..layers.declared import stored_uses
from ..layers.form import Nodes
from ..storage.schema import LARGEST, Multiplier, Names, Size, conform
from .tensors import stored_tensors

Built = TypeVar("Built")
#: From the name of a tensor in a group, and the tensor, to the shape it must have; KeyError where it has no place.
ShapeRule: TypeAlias = Callable[[str, Tensor], Sequence[int]]


#: Groups of variances, of standard deviations, and of what a curvature has along its eigenvectors.
NEVER_NEGATIVE = ("variance", "std", "diagonal")


class Details(TypedDict, total=False):
    """The facts that every posterior may hold; a class that holds others extends it."""

    survey: dict[str, Any]
    points: Names
    scale: Multiplier
    protocol: dict[str, Any]
    inputs: Any


class SampledFacts(TypedDict, total=False):
    """What draws made once are told; see `Draws`."""

    kind: str
    count: Size
    seed: int
    first: int
    uses: list[dict[str, Any]]
    additive: bool
    seeds: list[int]
    dropouts: Names
    scale: Multiplier


class SampledDetails(Details):
    """Facts of draws made once."""

    sampled: SampledFacts
    scalable: bool


class MixtureDetails(Details, total=False):
    """Facts of a mixture."""

    weighting: str
    component_weights: list[Multiplier]


class FactorDetails(Details, total=False):
    """Facts of a posterior with factors on nodes."""

    uses: list[dict[str, Any]]
    sites: list[dict[str, Any]]
    shared: list[str]
    dropouts: Names


def restored(make: Callable[[Any], Built], values: Any, where: str) -> Built:
    """Plain facts as what they stand for; whatever is wrong with them is ours to say."""
    try:
        return make(values)
    except Exception as error:  # a file may hold anything, and nothing but dataclasses is built
        raise StorageError(f"{where} cannot be read: {type(error).__name__}: {error}") from error


def check_details(kind: Any, details: Mapping[str, Any], network: nn.Module) -> None:
    """Refuse facts that are not of the types a class of posteriors declares, or do not fit the network."""
    if kind.details_type is None:  # a class of the user's own
        return
    conform(details, kind.details_type, "details")
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    if "survey" in details:
        surveyed = restored(Survey.from_json, details["survey"], "the survey")
        conform(surveyed.reasons, Names, "the survey's reasons")
        conform(surveyed.last, str | None, "the survey's last weight")
        check_uses(surveyed.uses, shapes)
    facts = details.get("sampled", details)
    if "uses" in facts or "sites" in facts:
        check_uses(restored(stored_uses, dict(facts), "the uses of weights").values(), shapes)
    for name in (details | facts).get("dropouts", {}):
        restored(network.get_submodule, name, "a dropout layer")


def check_uses(uses: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse uses of parameters that the network does not have, or has in another shape."""
    for use in uses:
        where = f"the use of {use.weight or use.bias!r}"
        conform(use, Use, where)
        unknown = [name for name in (use.weight, use.bias) if name is not None and name not in shapes]
        if unknown:
            raise StorageError(f"{where} names {unknown[0]!r}, which the network does not have")
        parts = 0 <= use.part < use.parts and 0 <= use.bias_part < use.bias_parts
        if parts and isinstance(use.form, Nodes) and use.weight is not None:
            shape = restored(lambda form: form.shape, use.form, where)
            parts = min(shape) > 0 and prod(shape) * use.parts == prod(shapes[use.weight])
        if not parts:
            raise StorageError(f"{where} does not fit its shape in the network, {shapes.get(str(use.weight))}")


def check_tensors(posterior: Any) -> None:
    """Refuse groups of tensors that a posterior does not have, or lacks, and shapes that do not fit."""
    rules = restored(lambda whole: whole.shapes(), posterior, "what tells the shapes of tensors")
    for key in posterior.tensors:
        group = posterior.group(key)
        for name, tensor in group.items():
            where = f"the tensor {key}.{name}"
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise StorageError(f"{where} holds NaN or infinity")
            if not tensor.is_floating_point() and key != "statistics":
                raise StorageError(f"{where} must hold floating-point numbers, got {tensor.dtype}")
            if (key in NEVER_NEGATIVE or name.endswith("running_var")) and (tensor < 0).any():
                raise StorageError(f"{where} must not be negative: it holds variances or standard deviations")
            if rules is None:  # a class of the user's own
                continue
            if key not in rules:
                raise StorageError(
                    f"{where} has no place in a posterior of {type(posterior.method).__name__}, which holds "
                    f"{', '.join(rules) or 'none beside the weights'}"
                )
            shape = restored(lambda rule: tuple(rule(name, tensor)), rules[key], where)  # noqa: B023
            if tuple(tensor.shape) != shape:
                raise StorageError(f"{where} must have shape {shape}, got {tuple(tensor.shape)}")
    for key in rules or ():
        if key not in posterior.tensors and key not in posterior.optional_groups:
            raise StorageError(f"a posterior of {type(posterior.method).__name__} lacks its tensors {key!r}")


@torch.no_grad()
def check_draws(posterior: Any) -> None:
    """Refuse a posterior of which a draw of some component cannot be made, or is none of its network's weights."""
    centre = stored_tensors(posterior.network)
    for index in range(posterior.num_components):
        generator = posterior.generator(0, index)
        drawn = restored(lambda index: posterior.draw(index, generator), index, f"draw {index}")  # noqa: B023
        for name, tensor in drawn.items():
            expected = centre.get(name)
            if tensor is expected:
                continue
            if expected is None or (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                raise StorageError(
                    f"draw {index} gives {name!r} as {tuple(tensor.shape)} of {tensor.dtype}, unlike the network"
                )
            if tensor.is_floating_point() and not (tensor.abs() <= LARGEST).all():
                raise StorageError(f"draw {index} of {name!r} holds NaN, infinity, or numbers beyond {LARGEST:g}")

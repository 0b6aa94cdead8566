"""A loss surface with networks on it, and the classes that draws name."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import DataError
from ..hints import checked
from .axes import axis_of, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours of a surface.
LEVELS = 20


@checked
def loss_surface(
    values: Tensor,
    x: Tensor,
    y: Tensor,
    *,
    components: Tensor | None = None,
    centre: Tensor | None = None,
    limits: tuple[float, float] | None = None,
    name: str = "NLL",
    axis: "Axes | None" = None,
) -> "Axes":
    """A quantity over a plane of weights, with the components of a mixture and their shared weights in it.

    [implicit BNN, Figure 2]

    Args:
        values: at all places, [X, Y].
        x: first coordinates, [X].
        y: second coordinates, [Y].
        components: places of the components, [K, 2].
        centre: that of the weights they share, [2].
        limits: least and largest value of the colours; None takes those of `values`.
        name: of the quantity.
        axis: to draw on.
    """
    if values.shape != (len(x), len(y)) or not values.isfinite().all():
        raise DataError(
            f"values must be finite numbers of shape {(len(x), len(y))}, one per place, got {tuple(values.shape)}"
        )
    lowest, highest = (float(end) for end in values.aminmax()) if limits is None else limits
    if not lowest < highest:
        raise DataError(f"a surface needs two different values to be drawn between, got {lowest} and {highest}")
    axis = axis_of(axis)
    levels = torch.linspace(lowest, highest, LEVELS + 1).tolist()
    heights = values.mT.double().cpu().numpy()
    drawn = axis.contourf(x.tolist(), y.tolist(), heights, levels=levels, extend="both" if limits else "neither")
    if components is not None:
        across, up = components.cpu().unbind(-1)
        axis.plot(across.tolist(), up.tolist(), "o", color=colour(1), markersize=5, label="components")
    if centre is not None:
        across, up = centre.tolist()
        axis.plot([across], [up], "*", color="red", markersize=12, label="shared weights")
    axis.set(xlabel="first principal component", ylabel="second")
    axis.get_figure(root=True).colorbar(drawn, ax=axis, label=name)  # pyright: ignore[reportOptionalMemberAccess]
    return axis


@checked
def class_draws(probs: Tensor, *, class_names: Sequence[str] | None = None, axis: "Axes | None" = None) -> "Axes":
    """Probabilities of the classes of one row, a dot per draw and a bar for their mean.  [implicit BNN, Figure 3]

    Args:
        probs: of every draw, [S, C].
        class_names: in the order of their numbers.
        axis: to draw on.
    """
    if probs.ndim != 2 or not probs.isfinite().all():
        raise DataError(f"probs must be finite numbers of shape [draws, classes], got {tuple(probs.shape)}")
    classes = probs.shape[1]
    if class_names is not None and len(class_names) != classes:
        raise DataError(f"class_names must name {classes} classes, got {len(class_names)}")
    probs = probs.detach().cpu()
    axis = axis_of(axis)
    axis.bar(range(classes), probs.mean(0).tolist(), color=colour(0), alpha=0.3)
    places = torch.arange(classes).expand_as(probs)
    axis.plot(places.flatten().tolist(), probs.flatten().tolist(), ".", color=colour(0), markersize=3, alpha=0.5)
    names = map(str, range(classes)) if class_names is None else class_names
    axis.set_xticks(range(classes), list(names), rotation=0 if class_names is None else 90)
    axis.set_ylim(0, 1.02)
    axis.set(ylabel="probability")
    return axis

"""Axes to draw on; matplotlib is imported when the first is asked for."""

from typing import TYPE_CHECKING

from ..errors import ConfigError, require_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours that people who confuse red and green can distinguish [Okabe and Ito 2008], in turn.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def axis_of(axis: "Axes | None") -> "Axes":
    """The axis given, or one in a new figure."""
    figure, axes = (require_extra(f"matplotlib.{part}", "report", "a plot") for part in ("figure", "axes"))
    if axis is None:
        return figure.Figure(layout="constrained").add_subplot()
    if not isinstance(axis, axes.Axes):
        raise ConfigError(f"axis must be an axis of matplotlib or None for a new one, got {axis!r}")
    return axis


def colour(number: int) -> str:
    """The colour of line or group number `number`."""
    return COLOURS[number % len(COLOURS)]

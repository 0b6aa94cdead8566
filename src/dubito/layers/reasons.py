"""The words in which every method says why a parameter stays a point, or why it is drawn in another way."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import warn
from .form import Form
from .layout import Layout

UNREAD = "no torch function of the forward pass reads it"
PARAMETRISED = "a parametrisation computes the weight from it"
PARTS = "it is used whole in one place and in parts in another"
MISREAD = "its layers do not tell its whole gradient: it is also used elsewhere, or rows touch there"
UNREACHED = "no gradient of the outputs reaches it: the network cuts the graph there or does not use it"
NO_ROWS = "no row changes what its layer reads"
UNKNOWN_ROWS = "which axis of its layer's inputs holds the rows cannot be determined"
ROWS_AS_CHANNELS = "its layer's inputs hold the rows where channels should be"
NO_MATRIX = "it multiplies no inputs: it is a vector, a scale or a shift"
NO_NODES = "it does not stand between input and output nodes"
NO_PRODUCT = "its layer does not multiply inputs by a matrix"
TABLE = "it is a table of vectors, not a product with inputs"
READS_INPUTS = "its layer reads the network's inputs"
UNDECLARED = "no module of PyTorch's own holds it, and `build` has no rows to learn its use from"
STEPS = "a recurrent layer applies it step by step"
NOT_ASKED = "not asked for"
FROZEN = "frozen: requires_grad=False"
SUBSET = "not in the subset"

NO_RULE = "there is no rule for "
#: Reasons that a method's definition gives, or that the user asked for: no warning names them.
EXPECTED = frozenset({NO_MATRIX, TABLE, READS_INPUTS, FROZEN, SUBSET})
#: The torch functions of recurrent layers: whole sequences and cells.
RECURRENT = frozenset(f"{mode}{cell}" for mode in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell"))


def no_rule(name: str, function: Any) -> str:
    """Why a parameter that a function without a rule reads is left out."""
    if "parametrizations" in name.split("."):
        return PARAMETRISED
    return f"{NO_RULE}the way {getattr(function, '__name__', function)} uses it"


def unread(name: str) -> str:
    """Why a parameter that no rule was asked about is left out."""
    return PARAMETRISED if "parametrizations" in name.split(".") else UNREAD


def of_layout(form: Form, layout: Layout) -> str | None:
    """Why a use has no axis of rows, or None."""
    if layout is Layout.UNKNOWN:
        return UNKNOWN_ROWS
    if layout is Layout.NONE:
        return NO_ROWS
    return ROWS_AS_CHANNELS if layout is Layout.SECOND and not form.trailing else None


def warn_points(method: object, points: Mapping[str, str], network: nn.Module) -> None:
    """One warning that names the matrices that stay points though the method would treat them.

    Args:
        method: its settings.
        points: why parameters stay points, by name.
        network: whose parameters they are.
    """
    shapes = {name: parameter.ndim for name, parameter in network.named_parameters()}
    named = {name: why for name, why in points.items() if shapes[name] > 1 and why not in EXPECTED}
    if named:
        listed = "; ".join(f"{name}: {why}" for name, why in named.items())
        remedy = "; name those to treat by subset= to silence this" if hasattr(method, "subset") else ""
        warn(f"{type(method).__name__} leaves {len(named)} of {len(shapes)} parameters as points ({listed}){remedy}")

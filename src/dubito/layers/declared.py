"""Which weights stand between nodes, where each row can have its own factors on them, and why others stay points.

Before any row comes PyTorch's own modules tell what they do with their weights; a survey then tells the rest.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from . import reasons
from .embedding import Lookup
from .form import Nodes
from .kinds import DECLARATIONS, Declared
from .layout import Layout
from .linear import Dense
from .norm import ChannelScale, Scale
from .recurrent import FUNCTIONS
from .uses import Survey, Use
from .version_1 import use_of_site


def declared(network: nn.Module) -> list[Use]:
    """The uses that the network's modules declare, in the order of the modules; layouts are not known.

    A weight that several modules hold has several uses. A weight computed from others (a parametrisation) is no
    parameter of its own and has none.
    """
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    uses = []
    for module in network.modules():
        for use in _declared(module):
            weight, bias = (
                None if key is None else names.get(id(module._parameters.get(key))) for key in (use.weight, use.bias)
            )
            if weight is not None:
                uses.append(Use(weight, bias, use.form, use.function, Layout.UNKNOWN, parts=use.parts))
    return uses


def _declared(module: nn.Module) -> Iterator[Declared]:
    for kind in type(module).__mro__:
        if kind in DECLARATIONS:
            yield from DECLARATIONS[kind](module)
            return


def weights_with_nodes(network: nn.Module, survey: Survey | None = None, *, embeddings: bool = True) -> dict[str, Use]:
    """Of every weight that stands between nodes one use, which tells them, by name, in the order of the modules.

    Args:
        network: the network.
        survey: of it; None where no rows have come yet: then only what PyTorch's own modules declare is known.
        embeddings: take tables of vectors too: their input nodes are the tokens.
    """
    uses = declared(network)
    names = {use.weight for use in uses}
    if survey is not None:  # a parameter that is no module's own must be used as a matrix everywhere
        uses += [use for use in survey.uses if use.weight in names or _only_nodes(survey, use.weight)]
    chosen: dict[str, Use] = {}
    for use in uses:
        if isinstance(use.form, Nodes) and (embeddings or not isinstance(use.form, Lookup)):
            chosen.setdefault(str(use.weight), use)
    return chosen


def stored_uses(details: dict[str, Any]) -> dict[str, Use]:
    """The weights with factors that a posterior's details hold, which files of version 1 held as sites."""
    if "sites" in details:
        sites = details.pop("sites")
        details["uses"] = [use_of_site(values).to_json() for values in sites]
    uses = [Use.from_json(values) for values in details.get("uses", ())]
    return {str(use.weight): use for use in uses}


def _only_nodes(survey: Survey, name: str | None) -> bool:
    if name is None or survey.reasons.get(name, "").startswith(reasons.NO_RULE):
        return False
    return all(use.weight == name and isinstance(use.form, Nodes) for use in survey.of(name))


def reading_inputs(network: nn.Module, survey: Survey) -> set[str]:
    """The weights that multiply the network's inputs; where no rule reads a weight, its bias tells.

    A recurrent layer that reads the inputs still has inner layers and a recurrent kernel that do not.
    """
    first = {use for use in survey.uses if use.reads_input and not use.steps}
    weights, biases = {use.weight for use in first}, {use.bias for use in first} - {None}
    known = (use for use in (*declared(network), *first) if use.weight is not None)
    return {str(use.weight) for use in known if use.weight in weights or use.bias in biases}


def shared_weights(
    uses: Mapping[str, Use],
    survey: Survey,
    *,
    additive: bool = False,
    layouts: Collection[Layout] = (Layout.ROWS, Layout.FLAT),
    steps: bool = True,
) -> list[str]:
    """The weights whose factors all rows of a pass must share.

    Args:
        uses: of the weights with factors, by name.
        survey: of the network.
        additive: whether factors are added to weights; then dense layers alone can have their own per row.
        layouts: of the layers whose rows can.
        steps: whether layers that apply a weight step by step can.
    """

    def by_row(use: Use, chosen: Use) -> bool:
        recurrent = use.function in FUNCTIONS
        return (
            use.layout in layouts
            and isinstance(use.form, Nodes)
            and use.views == chosen.views
            and (steps or not recurrent)
            and (not additive or (isinstance(use.form, Dense) and not recurrent))
        )

    shared = []
    for name, chosen in uses.items():
        seen = [use for use in survey.uses if use.weight == name]
        told = survey.reasons.get(name) in (None, reasons.UNREACHED)
        if not seen or not told or not all(by_row(use, chosen) for use in seen):
            shared.append(name)
    return shared


def bias_names(network: nn.Module, weights: Collection[str], survey: Survey | None = None) -> tuple[str, ...]:
    """The trainable biases of the layers whose weights carry factors."""
    known = [*declared(network), *(survey.uses if survey is not None else ())]
    learned = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    named = (use.bias for name in weights for use in known if use.weight == name)
    return tuple(dict.fromkeys(bias for bias in named if bias is not None and bias in learned))


def points_of(
    network: nn.Module,
    survey: Survey,
    treated: Collection[str],
    subset: Collection[str] | None = None,
    *,
    embeddings: bool = True,
    first: bool = True,
) -> dict[str, str]:
    """Why trainable parameters have no distribution, by name.

    Args:
        network: the network.
        survey: of it.
        treated: the parameters that have one.
        subset: those the user wants treated; None is all.
        embeddings: whether the method treats tables of vectors.
        first: whether it treats what reads the network's inputs.
    """
    points = {}
    for name, parameter in network.named_parameters():
        if name in treated or not parameter.requires_grad:
            continue
        weight_uses = [use for use in survey.uses if use.weight == name]
        if subset is not None and name not in subset:
            points[name] = reasons.SUBSET
        elif not weight_uses:
            points[name] = reasons.NO_MATRIX if survey.of(name) else survey.reasons.get(name, reasons.UNREAD)
        else:
            points[name] = _reason(parameter.ndim, weight_uses, embeddings, first)
    return points


def _reason(axes: int, uses: list[Use], embeddings: bool, first: bool) -> str:
    if not all(isinstance(use.form, Nodes) for use in uses):
        scales = axes < 2 or any(isinstance(use.form, Scale | ChannelScale) for use in uses)
        return reasons.NO_MATRIX if scales else reasons.NO_NODES
    if not first and any(use.reads_input for use in uses):
        return reasons.READS_INPUTS
    if not embeddings and any(isinstance(use.form, Lookup) for use in uses):
        return reasons.TABLE
    return reasons.UNDECLARED

"""What a posterior on the nodes starts from: which weights carry factors, and where those begin."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from .. import seeds
from ..errors import NetworkError
from ..fitting import Prepared, Start
from ..layers import Survey, Use, survey
from ..layers.declared import weights_with_nodes
from ..likelihoods import inverse_softplus
from ..networks import Subset, resolve
from .laws import Family, NearOne, Signs
from .posterior import SIDES


def surveyed(start: Start) -> Survey | None:
    """The survey of the network on the first rows of a fit; None where no rows have come yet."""
    return survey(start.network, start.example.inputs) if isinstance(start, Prepared) else None


def chosen_weights(
    network: nn.Module, subset: Subset, facts: Survey | None, *, embeddings: bool = True, without: Collection[str] = ()
) -> dict[str, Use]:
    """The trainable weights that can carry factors, of those `subset` picks, by name, but for those `without`."""
    names = {*resolve(subset, network)} - {*without}
    uses = weights_with_nodes(network, facts, embeddings=embeddings)
    chosen = {name: use for name, use in uses.items() if name in names}
    if not chosen:
        kinds = sorted({type(module).__name__ for module in network.modules() if len(list(module.parameters(False)))})
        raise NetworkError(
            "factors act on the nodes of dense, convolutional, recurrent, attention and embedding layers whose weight "
            f"is a trainable parameter of its own, but this network has none among {kinds}"
            + ("" if subset is None else f" that subset picks of {list(uses)}")
            + (f" beside {sorted(without)}" if without else "")
        )
    return chosen


def tensors_of(
    network: nn.Module,
    uses: Mapping[str, Use],
    families: tuple[Family | None, Family | None],
    components: int,
    *,
    initial: NearOne | Signs,
    initial_std: float,
    additive: bool = False,
    biases: Sequence[str] | None = None,
    seed: int,
) -> dict[str, dict[str, Tensor]]:
    """Locations, raw scales and biases of all components."""
    weights = dict(network.named_parameters())
    tensors: dict[str, dict[str, Tensor]] = {}
    for side, family in zip(SIDES, families, strict=True):
        if family is None:
            continue
        means = tensors.setdefault(f"{side}_mean", {})
        for name, use in uses.items():
            weight = weights[name]
            nodes = use.input_shape if side == "input" else use.output_shape
            stream = seeds.generator(seed, "factors", side, name)
            start = initial.draw((components, *nodes), family, stream) - (1.0 if additive else 0.0)
            means[name] = start.to(weight)
            if family.random:
                raw = inverse_softplus(torch.full_like(start, initial_std)).to(weight)
                tensors.setdefault(f"{side}_raw_std", {})[name] = raw
    if components > 1 and biases is not None:
        others = {name: weights[name].detach().unsqueeze(0) for name in biases}
        tensors["biases"] = {
            name: bias.repeat(components - 1, *(1 for _ in bias.shape[1:])) for name, bias in others.items()
        }
    return tensors

"""What a posterior on the nodes starts from: which weights carry factors, and where those begin."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import seeds
from ..errors import NetworkError
from ..factors import Family, NearOne, Signs
from ..layers.sites import Site, find_sites
from ..likelihoods import inverse_softplus
from ..networks import Subset, resolve
from .posterior import SIDES


def sites_of(network: nn.Module, subset: Subset, *, embeddings: bool = True) -> list[Site]:
    """The trainable weights that can carry factors, of those `subset` picks."""
    names = set(resolve(subset, network))
    sites = find_sites(network, embeddings=embeddings)
    chosen = [site for site in sites if site.parameter in names]
    if not chosen:
        kinds = sorted(
            {type(module).__name__ for module in network.modules() if len(list(module.parameters(False)))}
        )
        raise NetworkError(
            "factors act on the nodes of dense, convolutional, recurrent, attention and embedding layers whose weight "
            f"is a trainable parameter of its own, but this network has none among {kinds}"
            + ("" if subset is None else f" that subset picks of {[site.parameter for site in sites]}")
        )
    return chosen


def structure_of(
    network: nn.Module,
    sites: Sequence[Site],
    families: tuple[Family | None, Family | None],
    components: int,
    *,
    initial: NearOne | Signs,
    initial_std: float,
    additive: bool = False,
    biases: bool = True,
    seed: int,
) -> dict[str, dict[str, Tensor]]:
    """Locations, raw scales and biases of all components."""
    own = dict(network.named_parameters())
    structure: dict[str, dict[str, Tensor]] = {}
    for side, family in zip(SIDES, families, strict=True):
        if family is None:
            continue
        means = structure.setdefault(f"{side}_mean", {})
        for site in sites:
            weight = own[site.parameter]
            nodes = site.shape if side == "input" else site.outputs
            stream = seeds.generator(seed, "factors", side, site.parameter)
            start = initial.draw((components, *nodes), family, stream) - (1.0 if additive else 0.0)
            means[site.parameter] = start.to(weight)
            if family.random:
                raw = inverse_softplus(torch.full_like(start, initial_std)).to(weight)
                structure.setdefault(f"{side}_raw_std", {})[site.parameter] = raw
    if components > 1 and biases:
        structure["biases"] = {
            name: own[name].detach().unsqueeze(0).repeat(components - 1, *(1 for _ in own[name].shape))
            for name in bias_names(network, sites)
        }
    return structure


def bias_names(network: nn.Module, sites: Sequence[Site]) -> tuple[str, ...]:
    """The trainable biases of the layers that carry factors."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    found: dict[str, None] = {}
    for site in sites:
        for path in site.modules:
            for key, parameter in network.get_submodule(path).named_parameters(recurse=False):
                if "bias" in key.split("_") and parameter.requires_grad:
                    found[names[id(parameter)]] = None
    return tuple(found)

"""Factors on the nodes that feed a layer: per example in training, folded into weights at prediction."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..sites import Site
from ..trace import Layout, Visit


def per_example(site: Site, visits: Mapping[str, Visit]) -> bool:
    """Whether every example can have its own factors there; else one draw serves the whole batch."""
    return site.hooked and all(name in visits and visits[name].layout is Layout.ROWS for name in site.modules)


def read_first(visits: Mapping[str, Visit]) -> set[str]:
    """The modules that read the network's inputs: the first one called, and all that see them untouched."""
    first = next(iter(visits), None)
    return {name for name, visit in visits.items() if visit.reads_input or name == first}


@contextmanager
def factors_on_inputs(network: nn.Module, factors: Mapping[Site, Tensor]) -> Iterator[None]:
    """While open, each site's modules multiply their input by the site's factors [B, nodes]."""
    modules = dict(network.named_modules(remove_duplicate=False))
    handles = []
    hooked: set[int] = set()

    def hook(site: Site, values: Tensor):
        def multiply(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
            if args:
                return (site.on_input(args[0], values), *args[1:]), kwargs
            return args, {**kwargs, "input": site.on_input(kwargs["input"], values)}

        return multiply

    try:
        for site, values in factors.items():
            for name in site.modules:
                if id(modules[name]) not in hooked:  # one module under two names is hooked once
                    hooked.add(id(modules[name]))
                    handles.append(
                        modules[name].register_forward_pre_hook(hook(site, values), with_kwargs=True)
                    )
        yield
    finally:
        for handle in handles:
            handle.remove()


def bernoulli_factors(
    shape: tuple[int, ...], rate: float, like: Tensor, generator: torch.Generator | None
) -> Tensor:
    """0 with probability `rate`, else 1 / (1 − rate), so that the mean is 1."""
    keep = torch.full(shape, 1 - rate, dtype=like.dtype, device=like.device)
    return torch.bernoulli(keep, generator=generator) / (1 - rate)

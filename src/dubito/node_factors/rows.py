"""Predictions in which every row has factors of its own, as in training."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import seeds
from ..fitting import read
from ..inputs import Inputs, rows_of
from ..layers.node_noise import Sides, factors_on
from ..layers.shell import leased, seeded
from ..layers.sites import Site
from ..networks import run

if TYPE_CHECKING:
    from .posterior import NodePosterior, Noise

#: Rows whose noise is drawn from one generator.
BLOCK = 256


@torch.no_grad()
def row_draws(
    posterior: "NodePosterior", inputs: Inputs, num_samples: int, seed: int, first: int
) -> Iterator[Tensor]:
    """Outputs of rows from number `first` on, draw by draw; weights that rows share have one draw for all."""
    stds, bound, rows = posterior.stds(), posterior.method.bound, rows_of(inputs)
    additive = posterior.method.additive
    for index in range(num_samples):
        component = index % posterior.num_components
        chosen = slice(component, component + 1)
        generator = posterior.generator(seed, index)
        biases = posterior.drawn_biases(component, generator)
        weights = posterior.weights() | biases
        own: dict[Site, Sides] = {}
        for site in posterior.sites:
            name, weight = site.parameter, weights[site.parameter]
            if name in posterior.shared:
                noise = posterior.noise(site, (1, 1), generator, weight)
                sides = posterior.sides(site, chosen, noise, stds, bound)
                weights[name] = posterior.perturbed(site, weight, sides)
            else:
                labels = ("per example", index, name)
                noise = row_noise(posterior, site, seed, labels, first, rows, weight)
                own[site] = posterior.sides(site, chosen, noise, stds, bound)
        placed = {name: value.unsqueeze(0) for name, value in biases.items()}
        with (
            torch.no_grad(),
            seeded(posterior.network, seed, "network", index),
            leased(posterior.network) as shell,
            factors_on(shell, own, placed, passes=1, rows=rows, additive=additive),
        ):
            outputs = read(partial(run, shell, weights), inputs)
        yield outputs


def row_noise(
    posterior: "NodePosterior",
    site: Site,
    seed: int,
    labels: tuple[int | str, ...],
    first: int,
    rows: int,
    like: Tensor,
) -> "Noise":
    """Noise for rows from number `first` on: a row's does not depend on the rows around it."""
    parts: list[Noise] = []
    start = first
    while start < first + rows:
        block, offset = divmod(start, BLOCK)
        stream = seeds.generator(seed, *labels, block, device=like.device)
        inputs, outputs = posterior.noise(site, (BLOCK,), stream, like)
        stop = min(BLOCK, offset + first + rows - start)
        own = slice(offset, stop)
        parts.append((None if inputs is None else inputs[own], None if outputs is None else outputs[own]))
        start += stop - offset
    sides = [[each for each in side if each is not None] for side in zip(*parts, strict=True)]
    return torch.cat(sides[0]) if sides[0] else None, torch.cat(sides[1]) if sides[1] else None

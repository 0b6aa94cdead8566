"""Predictions in which every row has factors of its own, as in training."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import seeds
from ..fitting import read
from ..inputs import Inputs, TensorOptions, call, checked_inputs, chunks, rows_of
from ..layers.factors import Factors, NodeFactors
from ..layers.passes import asking
from ..layers.shell import seeded
from ..prediction import Prediction, PredictionOptions

if TYPE_CHECKING:
    from .posterior import NodePosterior, Noise

#: Rows whose noise is drawn from one generator.
BLOCK = 256


def per_example_prediction(posterior: "NodePosterior", inputs: Inputs, options: PredictionOptions) -> Prediction:
    """Averaged over draws of factors anew for each row; points have no others."""
    if posterior.num_atoms is not None:
        return posterior.sampled_prediction(inputs, options)
    inputs = checked_inputs(inputs, TensorOptions.of(posterior.network))
    samples = -(-options.num_samples // posterior.num_components) * posterior.num_components
    predictions, first = [], 0
    for piece in chunks(inputs, options.max_rows):
        draws = row_draws(posterior, piece, samples, options.seed, first)
        predictions.append(posterior.likelihood.predictive(draws))
        first += rows_of(piece)
    return type(predictions[0]).cat(predictions)


@torch.no_grad()
def row_draws(posterior: "NodePosterior", inputs: Inputs, num_samples: int, seed: int, first: int) -> Iterator[Tensor]:
    """Outputs of rows from number `first` on, draw by draw; weights that rows share, or Normal, have one for all."""
    stds, bound, rows = posterior.stds(), posterior.method.bound, rows_of(inputs)
    additive, shared, normals = posterior.method.additive, posterior.shared, posterior.normals
    for index in range(num_samples):
        component = index % posterior.num_components
        chosen = slice(component, component + 1)
        generator = posterior.generator(seed, index)
        drawn = posterior.bias_draws(torch.full((1,), component, device=generator.device), [generator])
        biases = {name: values[0] for name, values in drawn.items()}
        weights = posterior.weights() | biases
        per_row: dict[str, NodeFactors] = {}
        for name in posterior.uses:
            weight = weights[name]
            if name in shared:
                noise = posterior.noise(name, (1, 1), generator, weight)
                factors = posterior.factors(name, chosen, noise, stds, bound)
                weights[name] = posterior.folded(name, weight, factors)
            else:
                labels = ("per example", index, name)
                noise = row_noise(posterior, name, seed, labels, first, rows, weight)
                per_row[name] = posterior.factors(name, chosen, noise, stds, bound)
        weights |= {} if normals is None else normals.draw(normals.random, generator)
        context = Factors(per_row, passes=1, rows=rows, additive=additive)
        with (
            torch.no_grad(),
            seeded(posterior.network, seed, "network", index),
            asking(posterior.network, context, context.names, weights) as shell,
        ):
            outputs = read(partial(call, shell), inputs)
        yield outputs


def row_noise(
    posterior: "NodePosterior", name: str, seed: int, labels: tuple[int | str, ...], first: int, rows: int, like: Tensor
) -> "Noise":
    """Noise for rows from number `first` on: a row's does not depend on the rows around it."""
    parts: list[Noise] = []
    start = first
    while start < first + rows:
        block, offset = divmod(start, BLOCK)
        stream = seeds.generator(seed, *labels, block, device=like.device)
        inputs, outputs = posterior.noise(name, (BLOCK,), stream, like)
        stop = min(BLOCK, offset + first + rows - start)
        part = slice(offset, stop)
        parts.append((None if inputs is None else inputs[part], None if outputs is None else outputs[part]))
        start += stop - offset
    sides = [[noise for noise in side if noise is not None] for side in zip(*parts, strict=True)]
    return torch.cat(sides[0]) if sides[0] else None, torch.cat(sides[1]) if sides[1] else None

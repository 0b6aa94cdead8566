"""More data for a Laplace posterior: the same weights, the same basis."""

from typing import TYPE_CHECKING, Any

import torch

from ... import seeds
from ...curvature import statistics
from ...fitting import prepare_more, probe
from ...inputs import TensorOptions
from ...layers.shell import seeded
from ...likelihoods import BuiltLikelihood, GaussianLikelihood
from ...precision import passes_in
from ...sources import reading
from .data_fit import DataFitSums

if TYPE_CHECKING:
    from .posterior import LaplacePosterior


def updated(posterior: "LaplacePosterior", data: Any, num_data: int | None, seed: int) -> "LaplacePosterior":
    """See `LaplacePosterior.update`."""
    network, method, details = posterior.network, posterior.method, posterior.details
    likelihood = at_fit(posterior)
    with torch.inference_mode(False):
        more = prepare_more(network, data, likelihood, num_data=num_data, seed=seed)
    with (
        torch.inference_mode(False),
        reading(more.source, seed, "update", device=TensorOptions.of(network).device),
        seeded(network, seed, "update"),
    ):
        fit_sums = DataFitSums(likelihood, probe(network, more.example.inputs), more.example.targets)
        bases = {
            name: posterior.structure_of(block).basis(posterior.block_tensors(block))
            for name, block in posterior.blocks.items()
        }
        frozen = {name: basis for name, basis in bases.items() if basis is not None}
        needs = method.structure.needs.copy()
        needs["kronecker"] = needs["kronecker"] and not frozen  # the factors only gave the basis
        covered = posterior.cover(more.example.inputs)
        with passes_in(method.precision, *TensorOptions.of(network)):
            new = statistics(
                network,
                covered,
                more.source,
                likelihood,
                method.curvature,
                **needs,
                batch_size=method.batch_size or more.source.batch_size or 128,
                seed=seeds.derived(seed, "update", str(posterior.num_data)),  # labels of their own
                basis=frozen or None,
                watch=fit_sums.add,
            )
    total = posterior.num_data + more.num_data
    tensors = {
        block.weight: posterior.structure_of(block).joined(
            block, posterior.block_tensors(block), posterior.num_data / total, new[name]
        )
        for name, block in posterior.blocks.items()
    }
    facts = {
        name: {**details["facts"][name], **posterior.structure_of(block).facts(block, tensors[block.weight])}
        for name, block in posterior.blocks.items()
    }
    sums = {
        key: None if value is None else details[key] + value
        for key, value in fit_sums.result().details(more.num_data).items()
    }
    return posterior.replaced(
        tensors, num_data=total, data_scale=posterior.data_scale * total / posterior.num_data, facts=facts, **sums
    )


def at_fit(posterior: "LaplacePosterior") -> BuiltLikelihood:
    """The likelihood with the noise that the curvature was taken with."""
    likelihood, factor = posterior.likelihood, posterior.details["noise_factor"]
    if factor == 1:
        return likelihood
    assert isinstance(likelihood, GaussianLikelihood)
    return likelihood.with_noise_times(factor**-0.5)

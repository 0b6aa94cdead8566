"""Which weights have tied standard deviations, and how their factors start."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .. import seeds
from ..errors import ConfigError, unknown_name, warn
from ..networks import Subset, parameters_of


def matrix_shape(weight: Tensor) -> tuple[int, int]:
    """Outputs × (inputs · positions), as the k-tied paper flattens kernels (transposed); a vector has one row."""
    return (len(weight), weight[0].numel()) if weight.ndim > 1 and len(weight) else (1, weight.numel())


def tied_ranks(weights: Mapping[str, Tensor], subset: Subset, rank: int, network: nn.Module) -> dict[str, int]:
    """The rank of the standard deviations of each weight that is tied.

    Args:
        weights: those with a distribution, by name.
        subset: those to tie, by names or by a predicate that is asked about matrices; None takes all matrices
            whose both sides exceed `rank`.
        rank: k; a matrix with a shorter side gets that side instead, with a warning.
        network: that has them.
    """
    if subset is None:
        return {name: rank for name, weight in weights.items() if min(matrix_shape(weight)) > rank}
    if isinstance(subset, str):
        raise ConfigError(
            f"the weights to tie must be a list of names or a predicate, got {subset!r}; give [{subset!r}]"
        )
    matrices = {name: weight for name, weight in weights.items() if weight.ndim > 1}
    if callable(subset):
        wanted = {name for name, weight in matrices.items() if subset(name, weight)}
    else:
        wanted = set()
        for name in subset:
            matches = parameters_of(name, network)
            if not matches:
                raise unknown_name("parameter or module", name, dict(network.named_parameters()))
            wanted |= matches
    ranks = {}
    for name, weight in matrices.items():
        if name in wanted:
            limit = min(matrix_shape(weight))
            if rank > limit:
                warn(
                    f"{name} of shape {tuple(weight.shape)} is a matrix of rank {limit} at most: its standard "
                    f"deviations get rank {limit} instead of {rank}"
                )
            ranks[name] = min(rank, limit)
    if not ranks:
        raise ConfigError(f"the weights to tie must hold a matrix with a distribution, got none of {list(matrices)}")
    return ranks


def initial_factors(
    weight: Tensor, rank: int, std: float, spread: float, seed: int, name: str
) -> tuple[Tensor, Tensor]:
    """log_u [k, m] and log_v [k, n] at ½ (log σ − log k) plus N(0, spread²), so that U Vᵀ is about σ.

    [k-tied Normal, appendix D.4]
    """
    generator = seeds.generator(seed, "initial", name, device=weight.device)
    m, n = matrix_shape(weight)
    noise = torch.randn(rank, m + n, generator=generator, dtype=weight.dtype, device=weight.device)
    log_u, log_v = (0.5 * (math.log(std) - math.log(rank)) + spread * noise).split([m, n], 1)
    return log_u.contiguous(), log_v.contiguous()


@torch.no_grad()
def limit_std(log_u: Tensor, log_v: Tensor, most: float) -> None:
    """Scale those rows of σ = U Vᵀ down, in place, that hold an entry above `most`."""
    largest = (log_u.exp().mT @ log_v.exp()).amax(1)
    log_u.sub_((largest / most).clamp_min(1.0).log())

"""Noisy Adam, Vadam, VOGN and Noisy K-FAC as methods: natural-gradient variational inference."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ... import optim
from ...curvature import Block, cover
from ...fitting import Prepared
from ...hints import checked
from ...layers import Layout, Survey, reasons, survey
from ...method import Method
from ...networks import require_full, resolve, trainable
from ...noise_check import check_noise, logarithms
from ...training import Training, train
from .objective import NaturalObjective
from .posterior import NaturalPosterior


@dataclass(frozen=True, kw_only=True)
class NaturalGradient(Method):
    """What the four share: the learning rate and its schedule are those of `Training`; see `recommended_lr`."""

    posterior_type = NaturalPosterior
    #: The optimiser behind the method; it takes the method's settings by their names.
    optimizer_type: ClassVar[type[optim.NoisyOptimizer]]

    prior_std: float = 1.0
    initial_std: float | None = 0.05

    def __post_init__(self) -> None:
        type(self).optimizer_type.check(self._settings())

    def _settings(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def recommended_lr(self) -> float:
        """A learning rate to start from: a rate for Adam does not suit steps that are divided by a curvature."""
        return type(self).optimizer_type.recommended_lr

    @checked
    def optimizer(self, params: Sequence[Tensor], num_data: float) -> optim.NoisyOptimizer:
        """The optimiser with the method's settings."""
        return type(self).optimizer_type(params, num_data=num_data, **self._settings())

    def fit_prepared(self, prepared: Prepared, training: Training | None) -> NaturalPosterior:
        network = prepared.network
        resolve(None, network)  # refuses a network whose parameters are all frozen
        surveyed = survey(network, prepared.example.inputs)
        blocks = self._blocks(network, surveyed)
        details = {
            "survey": surveyed.to_json(),
            "factored": {block.weight: block.bias for block in blocks},
            "turned": [block.weight for block in blocks if block.turned],
        }
        draft = NaturalPosterior(
            network,
            prepared.likelihood,
            method=self,
            tensors=initial_tensors(trainable(network), blocks, self.initial_std or 0.0),
            details=details,
        )
        objective = NaturalObjective(
            draft,
            self.optimizer,
            row_layouts(surveyed, trainable(network)),
            num_data=prepared.num_data,
            modes=prepared.modes,
            mean_weight=prepared.source.mean_weight,
        )
        noise = logarithms(draft)
        history = train(objective, prepared.source, training or Training(), prepared.run)
        posterior = objective.posterior()
        posterior.history = history
        check_noise(posterior, noise, prepared)
        assert isinstance(posterior, NaturalPosterior)
        return posterior

    def _blocks(self, network: nn.Module, surveyed: Survey) -> list[Block]:
        """The blocks that get Kronecker factors."""
        return []


@dataclass(frozen=True, kw_only=True)
class DiagonalGradient(NaturalGradient):
    """What the three with a diagonal Gaussian share."""

    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class NoisyAdam(DiagonalGradient):
    """A diagonal Gaussian by natural gradients, in the manner of Adam.

    Args:
        betas: decay rates of the momentum and of the Fisher information's diagonal.
        prior_std: of the Normal prior around 0.
        kl_weight: λ; below 1 the posterior is colder.
        extrinsic_damping: added to the denominator of a step.
        initial_std: standard deviations to start from.
        count_rows: multiply the square of a batch's mean gradient by its rows; else draws are up to √B too wide.
    """

    optimizer_type = optim.NoisyAdam

    kl_weight: float = 1.0
    extrinsic_damping: float = 0.0
    count_rows: bool = True


@dataclass(frozen=True, kw_only=True)
class Vadam(DiagonalGradient):
    """Adam at perturbed weights, the perturbation being that of a diagonal Gaussian posterior.

    Args:
        betas: decay rates of the momentum and of the mean squared gradient.
        prior_std: of the Normal prior around 0.
        kl_weight: below 1 the posterior is colder.
        initial_std: standard deviations to start from.
        count_rows: multiply the square of a batch's mean gradient by its rows; else draws are up to √B too wide.
        correct_start: divide mean squared gradients in steps as if they had started at 0.
    """

    optimizer_type = optim.Vadam

    kl_weight: float = 1.0
    count_rows: bool = True
    correct_start: bool = False


@dataclass(frozen=True, kw_only=True)
class VOGN(DiagonalGradient):
    """A diagonal Gaussian from the squares of each row's own gradient.

    Args:
        betas: decay rate of the momentum, and rate at which new squares are taken in.
        prior_std: of the Normal prior around 0.
        kl_weight: the final λ.
        kl_start: the first λ; None starts at `kl_weight`.
        kl_steps: over so many steps λ moves in a straight line.
        extrinsic_damping: added to the precision.
        initial_std: standard deviations to start from.
    """

    optimizer_type = optim.VOGN

    betas: tuple[float, float] = (0.9, 0.001)
    kl_weight: float = 1.0
    kl_start: float | None = None
    kl_steps: int = 0
    extrinsic_damping: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NoisyKFAC(NaturalGradient):
    """A matrix normal for every layer by natural gradients, in the manner of K-FAC.

    Args:
        beta: rate of the factors' moving averages.
        prior_std: of the Normal prior around 0.
        kl_weight: λ; below 1 the posterior is colder.
        initial_std: standard deviations to start from, small for a trained network; None starts the averages at 0.
    """

    optimizer_type = optim.NoisyKFAC

    beta: float = 0.05
    kl_weight: float = 1.0

    def _blocks(self, network: nn.Module, surveyed: Survey) -> list[Block]:
        require_full(network, "the factorisation of Noisy K-FAC")
        names = list(row_layouts(surveyed, trainable(network)))
        return [block for block in cover(network, surveyed, names).blocks.values() if block.kronecker]


def initial_tensors(named: Mapping[str, Tensor], blocks: Sequence[Block], std: float) -> dict[str, dict[str, Tensor]]:
    """Tensors for the roots of blocks' factors, and for the standard deviations of all others, which start at `std`."""
    covered = {name for block in blocks for name in block.parameters}
    tensors = {"std": {name: torch.full_like(p, std) for name, p in named.items() if name not in covered}}
    if blocks:
        for key, side in (("input_tril", "columns"), ("output_tril", "rows")):
            tensors[key] = {
                block.weight: torch.eye(
                    getattr(block, side), dtype=named[block.weight].dtype, device=named[block.weight].device
                ).repeat(block.groups, 1, 1)
                for block in blocks
            }
    return tensors


def row_layouts(surveyed: Survey, names: Collection[str]) -> dict[str, Layout]:
    """Where the uses of parameters hold the rows, of those that layers other than recurrent ones use alike and whole.

    For the others, B times the square of the batch's mean gradient stands in for those of the rows.
    """
    layouts: dict[str, Layout] = {}
    for name in names:
        uses = surveyed.of(name)
        whole = all(use.parts == use.bias_parts == 1 for use in uses)
        recurrent = any(use.function in reasons.RECURRENT for use in uses)
        alike = len({use.layout for use in uses}) == 1
        if whole and alike and not recurrent and name not in surveyed.reasons:
            layouts[name] = uses[0].layout
    return layouts

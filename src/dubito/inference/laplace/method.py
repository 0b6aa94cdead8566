"""Laplace: a Gaussian around a trained network, as wide as the loss around it is flat."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...curvature import Block, Cover, Curvature, Empirical, Statistics, cover, statistics, usual_curvature
from ...distributions.structured import total
from ...errors import ConfigError, NetworkError, require_count, require_positive, warn
from ...fitting import Prepared, answered, prepare_more, probe, undisturbed
from ...hints import checked
from ...inputs import Inputs, TensorOptions, checked_inputs, take
from ...layers import Product, Survey, survey
from ...likelihoods import GaussianLikelihood
from ...method import Method, with_inputs
from ...networks import Subset, resolve, trainable, with_flags
from ...posterior import MixturePosterior, Posterior
from ...precision import Precision, passes_in
from ...priors import Around, require_one_prior
from ...sources import reading
from ...storage import LATER
from ...training import Training, current, train
from ..map import MAP, PointPosterior
from .data_fit import DataFit, DataFitSums, with_fitted_numbers
from .online import OnlineEvidence, OnlineObjective
from .posterior import LaplacePosterior, by_kind
from .structures import INF, KFAC, Diagonal, Structure
from .tuning import HIGHEST, LOWEST

#: Statistics that are stored in part are taken some layers at a time, by passes of their own, where all take more.
MOST_BYTES = 1 << 28


@checked
def last_layer(network: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """The names of the parameters of the last layer that a forward pass calls: `Laplace(subset=last_layer)`.

    Args:
        network: in evaluation mode.
        inputs: a few rows.
    """
    inputs = checked_inputs(inputs, TensorOptions.of(network))
    answered(network, take(inputs, slice(1)))  # says what it cannot read
    return last_used(network, survey(network, inputs))


def last_used(network: nn.Module, surveyed: Survey) -> tuple[str, ...]:
    """The trainable parameters of the last layer in a forward pass that multiplies its inputs by a weight."""
    named = dict(network.named_parameters())
    products = [use for use in surveyed.uses if isinstance(use.form, Product)]
    for use in reversed(products or surveyed.uses):
        names = {name for name in (use.weight, use.bias) if name is not None and named[name].requires_grad}
        if names:
            return tuple(name for name in named if name in names)
    raise NetworkError("last_layer needs a layer with trainable parameters that is called, got none")


@dataclass(frozen=True, kw_only=True)
class Laplace(Method):
    """Laplace approximation, post hoc: the network as given, or its MAP fit first with `training=`.

    Args:
        structure: how much of the curvature is kept: `Diagonal()`, `KFAC()`, `EFB()` or `INF(rank=100)`.
        prior_precision: τ, of the Normal prior around 0, also of the MAP fit. None: where `fit` is given validation
            rows, the least τ, from the precision of the trained weights themselves (one over their mean square)
            upwards, that costs these rows no more than .01 nats (reals .03) against the network itself, with one
            standard error; else that precision of the weights. The MAP fit is then under a standard Normal.
        curvature: `GGN()`, `Fisher(draws=...)` or `Empirical()`; None takes the exact `GGN()` up to 32 outputs, beyond
            them, and for outputs at many positions, `Fisher(draws=10)`. The posterior's method names which.
        subset: the parameters that get a distribution: `last_layer`, names of parameters or modules, or a
            predicate of (name, tensor); the rest are point estimates.
        batch_size: rows per pass; None takes the loader's own, or 128.
        linearised: what `predict` does unless told otherwise: take the network as linear in its weights, in closed
            form, where `num_samples` means nothing. `predict(x, linearised=False)` draws weights; around a network
            that fits its data well that is the worse prediction.
        precision: of passes through the network in the fit: "full", or autocast with "bf16" or "fp16", whose
            gradients below 6e-8 are lost. Sums over rows are in full precision.
        prior: `Around(network, std=...)` for one around pretrained weights, also of the MAP fit, in place of
            `prior_precision`; weight and bias of a layer have the same standard deviation.
        evidence: `OnlineEvidence()` to let the marginal likelihood choose prior precisions, and a Gaussian's learned
            noise, while the network is trained; they begin at `prior_precision`, or at 1.
    """

    structure: Structure = KFAC()
    prior_precision: float | None = None
    curvature: Curvature | None = None
    subset: Subset | Callable[[nn.Module, Inputs], tuple[str, ...]] = None
    batch_size: int | None = None
    linearised: bool = True
    precision: Precision = "full"
    prior: Around | None = field(default=None, metadata=LATER)
    evidence: OnlineEvidence | None = field(default=None, metadata=LATER)

    posterior_type = LaplacePosterior
    resumable = False

    def __post_init__(self) -> None:
        if self.prior_precision is not None:
            require_positive(prior_precision=self.prior_precision)
        require_one_prior(self.prior, self.prior_precision, None, "prior_precision")
        if self.batch_size is not None:
            require_count(batch_size=self.batch_size)
        if self.evidence is not None and (self.prior is not None or isinstance(self.curvature, Empirical)):
            raise ConfigError(
                "evidence= moves the precision of a prior around 0 by the curvature of the model; leave out prior= and "
                f"Empirical(), got {self.prior!r} and {self.curvature!r}"
            )

    def fit_prepared(self, prepared: Prepared, training: Training | None) -> LaplacePosterior:
        inputs = prepared.example.inputs
        surveyed = survey(prepared.network, inputs)
        names = self._names(prepared.network, surveyed, inputs)
        covered = cover(prepared.network, surveyed, names)
        outputs, targets = probe(prepared.network, take(inputs, slice(1))), prepared.example.targets[:1]
        curvature = self.curvature or usual_curvature(prepared.likelihood, outputs)
        # One that cannot treat such outputs says so before work starts.
        next(curvature.seeds(prepared.likelihood, outputs, targets, lambda _: torch.zeros_like(outputs)))
        self._warn(covered)
        precisions = self._precisions(prepared.network, covered)
        self._announce(covered, prepared.network)
        chosen = replace(self, curvature=curvature, subset=None if self.subset is None else names)
        if self.evidence is not None:
            return chosen._fit_online(prepared, training, names, covered)
        history = []
        if training is not None:
            std = None if self.prior else (self.prior_precision or 1.0) ** -0.5
            trained = MAP(prior_std=std, prior=self.prior).fit_prepared(prepared, training)
            prepared, history = with_point(prepared, trained), trained.history
            surveyed = survey(prepared.network, inputs)  # of the network that was trained
        posterior = chosen._standing(prepared, surveyed, names, training is not None, precisions, history=history)
        validation = None if self.prior_precision or self.prior else prepared.run.validation
        return posterior.with_chosen_precision(validation, prepared.seed) if validation else posterior

    def _fit_online(
        self, prepared: Prepared, training: Training | None, names: tuple[str, ...], covered: Cover
    ) -> LaplacePosterior:
        """Train under the prior that the marginal likelihood chooses on the way; the posterior of its best turn."""
        assert self.evidence is not None
        if training is None:
            raise ConfigError("evidence= chooses the prior while the network is trained; give training=Training(...)")

        def around(point: Posterior, precisions: dict[str, float], step: int, *, trained: bool, **facts: Any) -> Any:
            there = with_point(prepared, point)
            device = TensorOptions.of(there.network).device
            with reading(there.source, there.seed, "turn", step, device=device):  # also after an interruption
                return self._standing(there, survey(there.network, inputs), names, trained, precisions, **facts)

        inputs, blocks = prepared.example.inputs, covered.blocks.values()
        objective = OnlineObjective(
            PointPosterior(prepared.network, prepared.likelihood, method=self),
            self.evidence,
            around,
            {block.name: block.parameters for block in blocks},
            self.prior_precision or 1.0,
            num_data=prepared.num_data,
            modes=prepared.modes,
        )
        history = train(objective, prepared.source, training, prepared.run)
        turns = objective.turns
        precisions, step = turns["precisions"][turns["best"]], turns["steps"][turns["best"]]
        return around(objective.posterior(), precisions, step, trained=True, history=history, evidence=turns)

    def _standing(
        self,
        prepared: Prepared,
        surveyed: Survey,
        names: tuple[str, ...],
        trained: bool,
        precisions: dict[str, float],
        *,
        history: Sequence[dict[str, float]] = (),
        **details: Any,
    ) -> LaplacePosterior:
        """The posterior around a network as it is.

        Args:
            prepared: network, likelihood and data.
            surveyed: how the network uses its parameters.
            names: of the parameters that get a distribution.
            trained: whether the likelihood's noise was learned, and stays.
            precisions: prior precisions of blocks; none takes one for all.
            history: of the training.
            details: more facts.
        """
        network, inputs, curvature = prepared.network, prepared.example.inputs, self.curvature
        assert curvature is not None
        covered = cover(network, surveyed, names)
        blocks = list(covered.blocks.values())
        outputs, targets = probe(network, take(inputs, slice(1))), prepared.example.targets[:1]
        fit_sums = DataFitSums(prepared.likelihood, outputs, targets)
        facts, stored = {}, {}

        def keep(measured: dict[str, Statistics]) -> None:
            for name in list(measured):
                block, sums = covered.blocks[name], measured.pop(name)
                structure = self.structure if block.kronecker else Diagonal()
                chosen = structure.chosen(block, sums)
                stored[block.weight] = structure.keep(block, sums)
                facts[name] = {**chosen, **structure.facts(block, stored[block.weight])}

        with passes_in(self.precision, *TensorOptions.of(network)):
            data_fit = self._measured(prepared, covered, curvature, fit_sums, trained, keep)
        data_fit.warn_if_constant()
        precision = precisions or float(self.prior_precision or own_precision(network, blocks))
        if len({*precisions.values()}) == 1 and self.prior is None:
            precision = next(iter(precisions.values()))
        return LaplacePosterior(
            network,
            data_fit.likelihood,
            method=self,
            tensors=by_kind(stored),
            details={
                "survey": surveyed.to_json(),
                "points": dict(covered.left_out),
                "blocks": [block.to_json() for block in blocks],
                "facts": facts,
                "num_data": float(prepared.num_data),
                "data_scale": float(prepared.num_data),
                "noise_factor": 1.0,
                "prior_precision": precision,
                **self._distances(network, blocks),
                **data_fit.details(prepared.num_data),
                **details,
            },
            history=history,
        ).finished()

    @checked
    def around(
        self, posterior: Posterior, data: Any, *, validation: Any = None, num_data: int | None = None, seed: int = 0
    ) -> MixturePosterior:
        """The mixture of Laplace posteriors around every component of a fitted posterior, as of `Rank1` or an ensemble.

        A component is taken at the mean of its weights, or of its factors, and judged by the noise it has. Where a
        posterior is finitely many draws without a width, each is one.

        Args:
            posterior: of any method.
            data: the training rows, in any form that `fit` takes; the curvature is that of all of them.
            validation: as in `fit`: rows that choose the prior precision, where none is set.
            num_data: as in `fit`.
            seed: of drawn labels.
        """
        points = None if posterior.scalable else posterior.num_atoms
        count, centre = points or posterior.num_components, posterior if points else posterior.scaled(0)
        given, parts = {"num_data": num_data, "validation": validation, "seed": seed}, []
        with torch.inference_mode(False):
            for number in range(count):
                likelihood = posterior.likelihood.component(number, count)
                prepared = prepare_more(centre.fold(number), data, likelihood, **given)
                with undisturbed(prepared, "around"):
                    part = self.fit_prepared(prepared, None)
                parts.append(with_inputs(part, prepared))
        mixture = MixturePosterior(parts, method=parts[0].method, history=posterior.history)
        mixture.details["inputs"] = parts[0].details["inputs"]
        return mixture.finished()

    def _measured(
        self,
        prepared: Prepared,
        covered: Cover,
        curvature: Curvature,
        fit_sums: DataFitSums,
        trained: bool,
        keep: Callable[[dict[str, Statistics]], None],
    ) -> DataFit:
        """What the network says about the data; `keep` gets the curvature, of some blocks at a time."""
        network, likelihood, source = prepared.network, prepared.likelihood, prepared.source
        batch_size = self.batch_size or source.batch_size or 128
        device = TensorOptions.of(network).device
        processes = prepared.run.processes or current(Training().timeout, device)
        # The curvature depends on the noise, so residuals are looked at before; anything else on the way.
        residual = isinstance(likelihood, GaussianLikelihood) and likelihood.learns and not trained
        if likelihood.learns and not trained and not residual:
            likelihood = with_fitted_numbers(likelihood, network, source, batch_size)
            fit_sums.likelihood = likelihood
        if residual:
            fit_sums.read(network, source, batch_size)
            likelihood = fit_sums.result(residual_noise=True).likelihood
        for number, names in enumerate(self._together(covered, network)):
            measured = statistics(
                network,
                covered.only(names),
                source,
                likelihood,
                curvature,
                **self.structure.needs,
                batch_size=batch_size,
                seed=prepared.seed,
                processes=processes,
                watch=None if residual or number else fit_sums.add,
                keep_factors=False,
            )
            keep(measured)
        if not residual:
            fit_sums.join(processes, device)
        return fit_sums.result(residual_noise=residual)

    def _precisions(self, network: nn.Module, covered: Cover) -> dict[str, float]:
        """τ of every block under a prior around weights, else nothing; what cannot be one τ is refused."""
        if self.prior is None:
            return {}
        weights, precisions = dict(network.named_parameters()), {}
        self.prior.check(trainable(network))
        for block in covered.blocks.values():
            values = {name: self.prior.precision(name, weights[name]) for name in block.parameters}
            precisions[block.name] = values[block.weight]
            if len({*values.values()}) > 1:
                stds = {name: value**-0.5 for name, value in values.items()}
                raise ConfigError(
                    f"Laplace has one prior standard deviation for the weight and the bias of a layer, got {stds}; "
                    "give them one pattern"
                )
        return precisions

    def _distances(self, network: nn.Module, blocks: list[Block]) -> dict[str, dict[str, float]]:
        """|w* − w₀|² of every block under a prior around weights w₀, else nothing."""
        if self.prior is None:
            return {}
        weights, prior = {name: p.detach() for name, p in network.named_parameters()}, self.prior

        def distance(name: str) -> float:
            return float(total((weights[name] - prior.centre(name, weights[name])).square()))

        return {"prior_distances": {b.name: sum(distance(name) for name in b.parameters) for b in blocks}}

    def _names(self, network: nn.Module, surveyed: Survey, inputs: Inputs) -> tuple[str, ...]:
        if self.subset is last_layer:
            return last_used(network, surveyed)
        return resolve(self.subset, network)  # pyright: ignore[reportArgumentType]

    def _sizes(self, covered: Cover, network: nn.Module) -> dict[str, int]:
        """Bytes of the statistics of each block."""
        needs, sizes = self.structure.needs, {}
        width = max(TensorOptions.of(network).dtype.itemsize, 4)
        for name, block in covered.blocks.items():
            factors = needs["kronecker"] and block.kronecker
            diagonals = needs["eigenvalues"] + needs["diagonal"] if factors else 1
            size = factors * (block.rows**2 + block.columns**2) + diagonals * block.rows * block.columns
            sizes[name] = block.groups * size * width
        return sizes

    def _together(self, covered: Cover, network: nn.Module) -> list[list[str]]:
        """Blocks whose statistics are taken in one go: all that are stored whole, others up to some memory."""
        if not isinstance(self.structure, INF):
            return [list(covered.blocks)]
        gone, groups = MOST_BYTES, []
        for name, size in self._sizes(covered, network).items():
            if gone + size > MOST_BYTES:
                gone, groups = 0, [*groups, []]
            gone += size
            groups[-1].append(name)
        return groups

    def _announce(self, covered: Cover, network: nn.Module) -> None:
        """Log the memory that the fit takes beside the network and its passes."""
        sizes = self._sizes(covered, network)
        most = max(sum(sizes[name] for name in names) for names in self._together(covered, network))
        logging.getLogger("dubito").info(
            "%s of %d layers: %d bytes of statistics, %d at once", self.structure, len(sizes), sum(sizes.values()), most
        )

    def _warn(self, covered: Cover) -> None:
        """Name what is not covered as asked."""
        blocks, left_out = covered.blocks.values(), covered.left_out
        if left_out:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            warn(f"these parameters stay point estimates: {reasons}; name what to cover with subset= to say so")
        rank = self.structure.rank if isinstance(self.structure, INF) else None
        if rank is None or isinstance(rank, float):
            return
        small = {block.name: block.rows * block.columns for block in blocks if block.kronecker}
        small = {name: size for name, size in small.items() if size < rank}
        if small:
            warn(
                f"rank {rank} is more than these layers have and is reduced there: "
                f"{', '.join(f'{name} to {size}' for name, size in small.items())}; a fraction, such as "
                "INF(rank=0.1), fits layers of every size"
            )


def with_point(prepared: Prepared, point: Posterior) -> Prepared:
    """The same with a trained network and its noise."""
    return replace(prepared, network=with_flags(point.network, point.trainable), likelihood=point.likelihood)


def own_precision(network: nn.Module, blocks: list[Block]) -> float:
    """The precision of the weights themselves, one over their mean square: that of the likeliest prior."""
    weights = dict(network.named_parameters())
    squares = sum(float(total(weights[name].detach().square())) for block in blocks for name in block.parameters)
    size = sum(block.size for block in blocks)
    return min(max(size / squares, LOWEST), HIGHEST) if squares > 0 else 1.0

"""BALI: Bayesian layerwise inference, a network as a stack of Bayesian linear regressions [Kurle et al. 2024]."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ...errors import ConfigError, require_count, require_fraction, require_positive
from ...fitting import Prepared
from ...likelihoods import BuiltLikelihood, GaussianLikelihood
from ...method import Method
from ...networks import Subset
from ...noise_check import check_noise
from ...sources import OrderedSource, Source, TensorSource
from ...training import Step, Training, train
from ...training.schedules import Schedule
from .choose import LEAST_ROWS, Choice, WithheldRows, started
from .layer import Layer
from .objective import BALIObjective, prior_of, put_noise
from .posterior import BALIPosterior
from .setup import Topology, check_training, find_layers, initial_weights

#: Rows that tell the standard deviation of the targets where a source must be read to know them.
TOLD_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class BALI(Method):
    """Every layer is a Bayesian linear regression on what it reads, with targets that gradients propose.

    Args:
        step_size: α, how far pseudo-targets move along normalised gradients.
        update_rate: β, of the moving averages, in (0, 1].
        schedule: of the update rate; the paper's own divides it by 5 at 60 % and at 80 % of the run.
        prior_scale: σ_r² of the prior R_0 = σ_r² I, for inputs scaled as in Eq. 12.
        hidden_floor: σ_u² / N_eff of the prior U_0 = σ_u² I: the least noise of a layer's regression.
        output_floor: the same for the last layer of a regression, in units of the targets' variance; None chooses
            it on a tenth of the rows, which then take part in the fit proper.
        effective_data: N_eff, how many data points a layer's posterior answers for; None chooses it likewise.
        sampling: "weight" draws weights for a forward pass, "local" draws the outputs of layers for each row
            (BALI-L), "deterministic" takes the means.
        covariance: "mode" takes the most probable noise covariance Σ of a layer, "sampled" draws it with the weights.
        momentum: μ in [0, 1): pseudo-targets go on along the way the layer's mean last went.
        refactor_every: for how many steps a factorisation of a layer's joint matrix serves; between them its mean moves
            by Eq. 74. None takes 1, and more for layers with 512 inputs and outputs or more, 8 at most.
        initial_std: standard deviation of drawn first weights, in the paper's scale; None starts from the
            network's own.
        subset: the parameters to treat; the rest are points, trained by the optimiser.
    """

    step_size: float = 0.3
    update_rate: float = 0.2
    schedule: Schedule = Step()
    prior_scale: float = 40.0
    hidden_floor: float = 0.01
    output_floor: float | None = None
    effective_data: float | None = None
    sampling: Literal["weight", "local", "deterministic"] = "weight"
    covariance: Literal["mode", "sampled"] = "mode"
    momentum: float = 0.0
    refactor_every: int | None = None
    initial_std: float | None = None
    subset: Subset = None

    posterior_type = BALIPosterior

    def __post_init__(self) -> None:
        require_positive(step_size=self.step_size, prior_scale=self.prior_scale)
        require_fraction(zero=False, one=True, update_rate=self.update_rate)
        require_fraction(momentum=self.momentum)
        if self.refactor_every is not None:
            require_count(refactor_every=self.refactor_every)
        for name in ("effective_data", "initial_std"):
            if (value := getattr(self, name)) is not None:
                require_positive(**{name: value})
        for name in ("hidden_floor", "output_floor"):
            if (value := getattr(self, name)) not in (None, 0):
                require_positive(**{name: value})

    # -- one fit -----------------------------------------------------------------------------------------------

    def fit_prepared(self, prepared: Prepared, training: Training | None) -> BALIPosterior:
        training = training or Training()
        check_training(training)
        if prepared.source.total_weight is not None:
            raise ConfigError(
                "BALI normalises the gradients of a batch over its rows, so that its pseudo-targets know no weights of "
                "rows or classes; repeat rows with whole weights, or take another method"
            )
        topology = find_layers(prepared.network, prepared.example.inputs, self.subset)
        objective, source = self.begun(prepared, topology)
        posterior = fitted(objective, train(objective, source, training, prepared.run))
        check_noise(posterior, None, prepared)  # its standard deviations are solved for, from any start
        return posterior

    def begun(self, prepared: Prepared, topology: Topology) -> tuple[BALIObjective, Source]:
        """The objective of a run, which chooses the settings that are open, and the rows it sees."""
        method, source, run = self.resolved(topology), prepared.source, prepared.run
        objective = started(method, prepared.num_data).objective(prepared, topology, source, run.seed)
        chooses = method.open(prepared.likelihood, topology)
        if chooses and isinstance(source, OrderedSource) and source.num_data >= LEAST_ROWS:
            source = WithheldRows(source, run.seed)
            objective.choice = Choice(method, objective, source, run.seed)
        return objective, source

    def resolved(self, topology: Topology) -> "BALI":
        """The same with its subset as names."""
        if self.subset is None:
            return self
        return replace(self, subset=tuple(name for block in topology.blocks for name in block.parameters))

    def open(self, likelihood: BuiltLikelihood, topology: Topology) -> bool:
        """Whether some setting is to be chosen."""
        noisy = isinstance(likelihood, GaussianLikelihood) and topology.last is not None
        return self.effective_data is None or (self.output_floor is None and noisy)

    def objective(self, prepared: Prepared, topology: Topology, source: Source, seed: int) -> BALIObjective:
        """The objective around a prepared network."""
        network, likelihood = prepared.network, prepared.likelihood
        weights: dict[str, Tensor] = dict(network.named_parameters())
        if self.initial_std is not None:
            put(weights, self.first_weights(topology, weights, seed))
        std = target_std(likelihood, topology, source)
        tensors: dict[str, dict[str, Tensor]] = {"input_tril": {}, "output_tril": {}}
        for block in topology.blocks:
            block_std = std if block.name == topology.last else None
            mean = block.matrix(weights).detach()
            start = Layer.start(block.name, prior_of(self, topology, block, block_std, mean), mean)
            tensors["input_tril"][block.weight] = start.input_tril
            tensors["output_tril"][block.weight] = start.output_tril
        built, inferred = with_inferred_noise(likelihood, std)
        assert self.effective_data is not None
        details = {
            "survey": topology.cover.survey.to_json(),
            "points": dict(topology.points),
            "blocks": [block.to_json() for block in topology.blocks],
            "effective_data": {block.weight: float(self.effective_data) for block in topology.blocks},
            "last": topology.last if std is not None else None,
        }
        draft = BALIPosterior(network, built, method=self, tensors=tensors, details=details)
        return BALIObjective(
            draft, topology, target_std=std, inferred_noise=inferred, num_data=prepared.num_data, modes=prepared.modes
        )

    def first_weights(self, topology: Topology, weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
        """Drawn first weights by parameter name."""
        assert self.initial_std is not None
        scales = {b.name: 1.0 if b.name in topology.first else b.columns**-0.5 for b in topology.blocks}
        like = weights[topology.blocks[0].weight]
        return initial_weights(topology.blocks, scales, self.initial_std, like, seed)


def fitted(objective: BALIObjective, history: list[dict[str, float]]) -> BALIPosterior:
    """The posterior of a run that has ended."""
    assert objective.final is not None
    objective.draft.details["jitters"] = objective.final.jitters()
    posterior = objective.posterior()
    posterior.history = history
    assert isinstance(posterior, BALIPosterior)
    return posterior


def target_std(likelihood: BuiltLikelihood, topology: Topology, source: Source) -> Tensor | None:
    """Of targets in the outputs' units, per output, where the last layer learns from them; else None."""
    if not isinstance(likelihood, GaussianLikelihood) or topology.last is None:
        return None
    if isinstance(source, TensorSource):
        targets = source.batch.targets
    else:
        parts, rows = [], 0
        for batch in source.batches(1024):
            parts.append(batch.targets)
            rows += len(batch.targets)
            if rows >= TOLD_ROWS:
                break
        targets = torch.cat(parts)
    flat = likelihood.standardised(targets).reshape(len(targets), -1)
    std = flat.std(0, unbiased=False)
    return torch.where(std > 0, std, torch.ones_like(std))


def with_inferred_noise(likelihood: BuiltLikelihood, target_std: Tensor | None) -> tuple[BuiltLikelihood, bool]:
    """The likelihood with noise to be inferred in place of learned noise, and whether it was so."""
    if target_std is None or not isinstance(likelihood, GaussianLikelihood) or likelihood.raw_std is None:
        return likelihood, False
    std = likelihood.std().detach()
    single = target_std.numel() == 1
    built = likelihood.with_noise(std=std) if single else likelihood.with_noise(covariance=std.square().diag())
    put_noise(built, target_std.to(std).diag())
    return built, True


@torch.no_grad()
def put(parameters: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Copy values into tensors of the same names."""
    for name, value in values.items():
        parameters[name].copy_(value)

"""The Laplace posterior: a Gaussian around the network's weights, block by block."""

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from ...curvature import Block, Cover, check_blocks, cover
from ...distributions import GroupedNormal, StructuredNormal
from ...distributions.kronecker import EigenbasisNormal
from ...distributions.two_sided import TwoSided
from ...errors import ConfigError, DataError, NetworkError, require_count, require_positive, unknown_name
from ...hints import checked
from ...inputs import Inputs, TensorOptions, checked_inputs, map_tensors
from ...layers.tree import alias
from ...likelihoods import GaussianLikelihood, at_least_float
from ...matrices import BlockDrawer, BlockPosterior
from ...posterior import MAX_ROWS, NamedTensors, ShapeRule
from ...prediction import Prediction, PredictionOptions, require_answers
from ...sources import Source
from ...summary import Summary
from .closed import closed_form
from .facts import LaplaceDetails
from .joint import Joint, joint_outputs
from .linearised import Linearised, closed_prediction
from .search import Predictive, searched
from .search import described as described_search
from .structures import BlockTensors, Diagonal, Structure, one_group
from .tuning import Evidence, best_prior
from .update import updated
from .validation import best_scale, chosen_precision, described

#: Data scales that validation chooses from, over the number of data: half decades.
SCALES = tuple(10 ** (power / 2) for power in range(-6, 9))


class LaplacePosterior(BlockPosterior):
    """w ~ N(w*, P⁻¹), P = N_s · curvature + τ, one matrix P per block.

    `details` holds the plain facts: the blocks, the number of data N, the data scale N_s, the prior precision τ
    (one number, or one per block), the log-likelihood of the data at w*, and for real targets their squared
    errors; `noise_factor` is the factor of the noise's variance since the curvature was taken, by which the
    curvature has shrunk; `precision_choice`, where validation rows chose τ, holds what was tried (`grid`, with the
    mean `losses` of a row against the network itself, their `standard_errors` and the epistemic `shares`), what was
    `taken`, and whether that is `no_uncertainty`.
    """

    scalable = True
    details_type = LaplaceDetails
    optional_groups = ("diagonal",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        blocks = (Block.from_json(values) for values in self.details["blocks"])
        self.blocks = {block.name: block for block in blocks}
        self._of_weight = {block.weight: block for block in self.blocks.values()}
        self._of_bias = {block.bias: block for block in self.blocks.values() if block.bias is not None}
        self._built: dict[str, tuple[Any, tuple[StructuredNormal, ...]]] = {}
        self._cover: Cover | None = None
        self._linearised: Linearised | None = None

    def shapes(self) -> dict[str, ShapeRule]:
        check_blocks(self.blocks.values(), self.weights())
        for facts in (self.prior_precisions, self.details.get("prior_distances", self.blocks)):
            if facts.keys() != self.blocks.keys():
                raise KeyError("one prior precision for each block is needed")
        shapes = {
            block.weight: self.structure_of(block).shapes(block, self.block_tensors(block))
            for block in self.blocks.values()
        }
        kinds = {kind for block in shapes.values() for kind in block}
        return {kind: lambda name, _, kind=kind: shapes[name][kind] for kind in kinds}

    # -- the distribution ----------------------------------------------------------------------------------

    def drawn_blocks(self) -> list[Block]:
        return list(self.blocks.values())

    def block_drawer(self) -> BlockDrawer:
        centre = self.weights()

        def drawn(block: Block, generator: torch.Generator | None) -> dict[str, Tensor]:
            parts = self.normals(block.name, centre)
            matrices = [part.rsample(generator=generator) for part in parts]
            if self.scale != 1:
                matrices = [torch.lerp(p.mean, m, self.scale) for p, m in zip(parts, matrices, strict=True)]
            stacked = matrices[0] if len(matrices) == 1 else torch.stack(matrices)
            shape = (block.groups, block.rows, block.columns)
            return block.tensors(stacked.reshape(shape).to(centre[block.weight].dtype))

        return drawn

    def root(self, block: Block) -> TwoSided | None:
        normal = self.normals(block.name)[0]
        same = normal.mean.dtype == self.network.get_parameter(block.weight).dtype
        return normal.two_sided(self.scale) if isinstance(normal, EigenbasisNormal) and same else None

    def block(self, name: str) -> Distribution:
        """The distribution of one layer: of its weight with the bias as the last column.

        It has `rsample`, `log_prob`, `variance`, and for small layers the dense `precision_matrix` and
        `covariance_matrix`; a layer of several groups is a batch of matrices.
        """
        if name not in self.blocks:
            raise unknown_name("block", name, self.blocks)
        parts, squared = self.normals(name), self.scale**2
        if squared == 0:
            raise ConfigError("a posterior scaled by 0 has no density; ask the one before scaled(0)")
        if squared != 1:  # P over s² is that of N_s over s² rows under τ over s²
            prior = self.prior_precisions[name] / squared
            parts = [part.rescaled(num_data=part.num_data / squared, prior_precision=prior) for part in parts]
        return parts[0] if len(parts) == 1 else GroupedNormal(parts)

    def normals(self, name: str, weights: Mapping[str, Tensor] | None = None) -> tuple[StructuredNormal, ...]:
        """The distributions of one block's matrices at scale 1, built on first use and anew after a move."""
        block = self.blocks[name]
        centre = self.weights() if weights is None else weights
        state = tuple((centre[key].dtype, centre[key].device, centre[key].data_ptr()) for key in block.parameters)
        if name not in self._built or self._built[name][0] != state:  # moved since
            with torch.no_grad():
                self._built[name] = state, self._normals(block)
        return self._built[name][1]

    def _normals(self, block: Block) -> tuple[StructuredNormal, ...]:
        mean = at_least_float(block.matrix(self.weights()))
        tensors = {kind: tensor.to(mean) for kind, tensor in self.block_tensors(block).items()}
        structure, groups = self.structure_of(block), block.groups
        if isinstance(structure, Diagonal):  # groups are independent anyway: one tall matrix
            mean, groups = mean.flatten(0, 1)[None], 1
            tensors = {kind: tensor.flatten(0, 1)[None] for kind, tensor in tensors.items()}
        return tuple(
            structure.normal(
                mean[group],
                one_group(tensors, group),
                num_data=self.data_scale / self.details["noise_factor"],
                prior_precision=self.prior_precisions[block.name],
            )
            for group in range(groups)
        )

    def block_tensors(self, block: Block) -> BlockTensors:
        """The stored tensors of a block, by kind."""
        groups = {kind: self.group(kind) for kind in self.tensors}
        return {kind: group[block.weight] for kind, group in groups.items() if block.weight in group}

    def structure_of(self, block: Block) -> Structure:
        """What is kept of a block: the method's structure, or the diagonal where no factors exist."""
        return self.method.structure if block.kronecker else Diagonal()

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._built.clear()  # moved
        return super()._apply(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As every module's; what was built from the old tensors is forgotten."""
        self._built.clear()
        return super().load_state_dict(*args, **kwargs)

    # -- what is known about it ----------------------------------------------------------------------------

    @property
    def num_data(self) -> float:
        """N, the number of rows the posterior answers for."""
        return self.details["num_data"]

    @property
    def data_scale(self) -> float:
        """N_s, by which the mean curvature counts; N unless validation chose another."""
        return self.details["data_scale"]

    @property
    def prior_precision(self) -> float | dict[str, float]:
        """τ, or one per block by name."""
        return self.details["prior_precision"]

    @property
    def prior_precisions(self) -> dict[str, float]:
        """τ of every block."""
        precision = self.prior_precision
        return precision if isinstance(precision, dict) else dict.fromkeys(self.blocks, precision)

    def holds(self, name: str) -> str:
        if name in self._of_bias:
            return f"in the block of {self._of_bias[name].weight}"
        block = self._of_weight.get(name)
        if block is None:
            return super().holds(name)
        structure = self.structure_of(block)
        if type(structure) is not type(self.method.structure):
            return f"{structure.title}: no Kronecker factors"
        facts = self.details["facts"].get(block.name)
        if not facts:
            return structure.title
        lowered = f" of {facts['requested_rank']}" if facts["rank"] < facts["requested_rank"] else ""
        return (
            f"{structure.title}, K {facts['rank']}{lowered}, L {facts['size']}, {facts['captured']:.0%} of the "
            f"trace, {facts['negative']:.0%} of D negative"
        )

    def summary(self) -> Summary:
        """Which layer holds what, and how validation rows chose the prior precision."""
        kinds = (("precision_choice", described), ("search", described_search))
        notes = tuple(line(self.details[key]) for key, line in kinds if self.details.get(key))
        return dataclasses.replace(super().summary(), notes=notes)

    # -- predictions ---------------------------------------------------------------------------------------

    @property
    def default_form(self) -> str:
        return "linearised" if self.method.linearised else "sampled"

    def linearised_prediction(self, inputs: Inputs, options: PredictionOptions) -> Prediction:
        """In closed form, of the network as linear in its weights around their mean."""
        with torch.inference_mode(False):  # gradients are needed, also where the caller turned them off
            inputs = self.readable(inputs)
            normals = partial(self.normals, weights=self.weights())
            read, likelihood = self.linearised(inputs), self.likelihood
            draws = {"seed": options.seed, "num_samples": options.num_samples}
            return closed_prediction(read, likelihood, inputs, normals, options.max_rows, self.scale, **draws)

    def closed_form(self, inputs: Inputs, num_samples: int, seed: int) -> nn.Module | None:
        with torch.inference_mode(False):
            return closed_form(self, self.readable(inputs), num_samples=num_samples, seed=seed)

    @checked
    def joint(self, inputs: Inputs) -> Joint:
        """The outputs of several rows together, in closed form, of the network as linear in its weights.

        They are the network's outputs, before the likelihood's noise, in the targets' units. Where inputs require
        gradients, mean and covariance are differentiable in them, as acquisition functions ask.

        Args:
            inputs: what the network reads.
        """
        wanted = torch.is_grad_enabled()
        with torch.inference_mode(False):  # which turns gradients on
            rows = self.readable(inputs)
            rows = rows if wanted else map_tensors(Tensor.detach, rows)
            normals = partial(self.normals, weights=self.weights())
            mean, covariance = joint_outputs(self.linearised(rows), rows, normals)
            require_answers(mean)
            require_answers(covariance.diagonal().reshape(mean.shape))
            covariance = covariance * self.scale**2
            scale = getattr(self.likelihood, "scale", None)
            if scale is not None and scale.shape == self.likelihood.restored(mean).shape[1:]:
                scale = scale.expand_as(mean).flatten()
                mean, covariance = self.likelihood.restored(mean), covariance * scale.unsqueeze(1) * scale
            return Joint(mean, covariance)

    def linearised(self, inputs: Inputs) -> Linearised:
        """What reads the network's Jacobians; `inputs` are checked rows like those it will read."""
        covered, linearised = self.cover(inputs), self._linearised
        if linearised is None or linearised.cover is not covered:
            linearised = self._linearised = Linearised(self.network, covered)
        return linearised

    def cover(self, inputs: Inputs) -> Cover:
        """The posterior's blocks in its network.

        Args:
            inputs: checked rows, from which a posterior of an older file learns how its network uses them.
        """
        if self._cover is None:
            names = [name for block in self.blocks.values() for name in block.parameters]
            covered = cover(self.network, self.survey(inputs), names)
            if dict(covered.blocks) != self.blocks:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in covered.left_out.items())
                raise NetworkError(
                    "the network must use its layers as in the fit, but with these inputs they look different "
                    f"({reasons or 'other blocks'}); predict with draws instead"
                )
            self._cover = covered
        return self._cover

    def readable(self, inputs: Inputs) -> Inputs:
        """The inputs, checked and fit for gradients."""
        inputs = checked_inputs(inputs, TensorOptions.of(self.network))
        return map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, inputs)

    # -- prior, noise, data scale --------------------------------------------------------------------------

    def log_marginal_likelihood(self) -> float:
        """Log p(D) ≈ log p(D|w*) + log p(w*) − ½ log|P| + P/2 log 2π, in nats, of all data together.

        It judges the model, as `tuned` does: the data scale in it is the number of data, whatever validation chose, and
        the posterior's scale is 1.
        """
        return self.log_likelihood + self.evidence().log_occam(self.prior_precisions)

    @property
    def log_likelihood(self) -> float:
        """Log p(D|w*) at the present noise."""
        details = self.details
        factor = details["noise_factor"]
        if factor == 1:
            return details["log_likelihood"]
        # log N(y | f, κ²σ²) = log N(y | f, σ²) + ½ (1 − 1/κ²) ((y − f)/σ)² − ½ log κ²
        change = (1 - 1 / factor) * details["squared_errors"] - details["num_values"] * math.log(factor)
        return details["log_likelihood"] + change / 2

    @checked
    def evidence(self, noise_factor: float | None = None) -> Evidence:
        """The marginal likelihood as a function of the prior.

        Args:
            noise_factor: of the noise's variance since the curvature was taken; the present one if not given.
        """
        factor = noise_factor or self.details["noise_factor"]
        normals, distances = {n: self.normals(n) for n in self.blocks}, self.details.get("prior_distances")
        return Evidence(normals, self.num_data / factor, distances)

    @checked
    def tuned(
        self,
        *,
        prior: bool = True,
        per_layer: bool = False,
        noise: bool = False,
        validation: Any = None,
        scales: Sequence[float] = SCALES,
        max_rows: int = MAX_ROWS,
        predictive: Predictive | None = None,
        trials: int = 300,
        num_samples: int = 32,
        seed: int = 0,
    ) -> "LaplacePosterior":
        """The posterior with the prior precision of the largest marginal likelihood; nothing is fitted again.

        With `predictive`, the prior precision and the data scale instead whose predictions of validation rows are
        likeliest, of `trials` pairs around the present one, which is among them; `details["search"]` says which were
        tried. No trial reads training rows. Linearised, eight ratios of the two are factorised in two passes over the
        rows; by draws at most 2,000 rows judge, and the worse half of the pairs is dropped after 2, 4, 8, ... draws.

        Args:
            prior: choose the prior precision; False keeps the present one.
            per_layer: one prior precision for each block, not one for all.
            noise: also the size of a Gaussian's learned noise: all its variances by one factor.
            validation: rows that choose the data scale too, by the negative log-likelihood of linearised
                predictions; they are read once.
            scales: data scales to choose from, over the number of data.
            max_rows: rows of validation that go through the network at once.
            predictive: by what predictions pairs are judged, those that are made afterwards: "draws" or "linearised".
            trials: pairs that are tried.
            num_samples: draws that judge a pair.
            seed: of pairs and draws.
        """
        require_count(max_rows=max_rows, trials=trials, num_samples=num_samples)
        if predictive is not None and (validation is None or per_layer or noise or not prior):
            raise ConfigError(
                f"predictive={predictive!r} searches prior precision and data scale together by the rows of "
                "validation=, without per_layer=, noise= or prior=False"
            )
        for index, scale in enumerate(scales):
            require_positive(**{f"scales[{index}]": scale})
        if not (prior or noise) and validation is None:
            raise ConfigError("tuned(prior=False) leaves nothing to choose; give noise=True or validation=")
        options = {"trials": trials, "num_samples": num_samples, "seed": seed, "max_rows": max_rows}
        with torch.inference_mode(False):
            if predictive is not None:
                return self._with(**searched(self, validation, predictive, **options))
            changes = best_prior(self, prior=prior, per_layer=per_layer, noise=noise)
            if prior:
                changes["precision_choice"] = None
            tuned = self._with(data_scale=self.num_data, search=None, **changes)
            if validation is None:
                return tuned
            return tuned._with(data_scale=best_scale(tuned, self, validation, scales, max_rows))

    def with_chosen_precision(self, validation: Source, seed: int) -> "LaplacePosterior":
        """The posterior under the prior precision that checked validation rows choose; `details` say how."""
        return self._with(**chosen_precision(self, validation, seed))

    @checked
    def update(self, data: Any, *, num_data: int | None = None, seed: int = 0) -> "LaplacePosterior":
        """The posterior after more data, around the same weights and under the same prior.

        The eigenvectors of EFB and INF, and which of them INF keeps, stay those of the first data: Λ and Φ become
        means over all data along them. KFAC's factors and the diagonal become exactly what they would have been.

        Args:
            data: a pair, a `Dataset` or a `DataLoader`.
            num_data: the number of rows, where the data do not tell.
            seed: of drawn labels.
        """
        posterior = updated(self, data, num_data, seed)
        if not all(tensor.isfinite().all() for tensor in posterior.tensors.parameters()):
            raise DataError("the curvature of these data is NaN or infinite; look at the sizes of inputs and targets")
        return posterior

    def replaced(self, tensors: Mapping[str, BlockTensors], **details: Any) -> "LaplacePosterior":
        """A posterior with other stored tensors, by weight, and other details; the weights are shared."""
        other = self._with(**details)
        groups = {kind: NamedTensors(group) for kind, group in by_kind(tensors).items()}
        other.tensors = nn.ModuleDict(groups)
        return other.finished()

    def _with(self, **details: Any) -> "LaplacePosterior":
        """A posterior of its own with other details and the same tensors, in the same memory."""
        noise = details.get("noise_factor", self.details["noise_factor"]) / self.details["noise_factor"]
        memo: dict[int, Any] = {id(p): alias(p) for p in self.parameters()}
        memo |= {id(buffer): buffer.detach() for buffer in self.buffers()}
        memo[id(self._built)] = {}
        other = copy.deepcopy(self, memo)
        other.details = {**self.details, **details}
        if noise != 1:
            assert isinstance(other.likelihood, GaussianLikelihood)
            other.likelihood = other.likelihood.with_noise_times(noise**0.5)
        return other


def by_kind(tensors: Mapping[str, BlockTensors]) -> dict[str, dict[str, Tensor]]:
    """Stored tensors of all blocks, from weight and kind to kind and weight."""
    kinds = dict.fromkeys(kind for group in tensors.values() for kind in group)
    return {kind: {weight: group[kind] for weight, group in tensors.items() if kind in group} for kind in kinds}

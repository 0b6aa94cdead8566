"""The prior by marginal likelihood while the network is trained [Immer et al. 2021, Algorithm 1].

Every few epochs a Laplace posterior is fitted at the weights of the moment; prior precisions move towards, and the
noise of a Gaussian to, the maximum of its marginal likelihood, and training goes on under them. Of all such turns the
weights, the prior and the noise of the largest marginal likelihood stay.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError, DubitoWarning, require_count, require_positive
from ...hints import Checked
from ...likelihoods import GaussianLikelihood, inverse_softplus
from ...networks import duplicate, trainable
from ...objective import PlainObjective
from ...posterior import Posterior, detached
from ...storage.schema import conform
from ...training import GradientStepper, Plan, Processes, Training
from ...training.checkpoint import check_forms, forms_of, put
from .facts import EvidenceTurns
from .posterior import LaplacePosterior
from .tuning import best_prior


@dataclass(frozen=True, kw_only=True)
class OnlineEvidence(Checked):
    """How the marginal likelihood chooses the prior in training: `Laplace(evidence=OnlineEvidence())`.

    Args:
        every: epochs from one turn to the next; a turn is a fit of the Laplace posterior. The last epoch ends with one.
        burn_in: epochs before the first.
        per_layer: one prior precision for each block, not one for all.
        step: how far the logarithm of a prior precision may move in a turn.
    """

    every: int = 5
    burn_in: int = 0
    per_layer: bool = False
    step: float = 1.0

    def __post_init__(self) -> None:
        require_count(every=self.every)
        require_count(0, burn_in=self.burn_in)
        require_positive(step=self.step)


class OnlineObjective(PlainObjective):
    """The loss of the point estimate under prior precisions that move.

    Args:
        draft: the point under training.
        settings: when and how the prior moves.
        around: from a point, prior precisions, the number of steps made and whether its noise was trained, to the
            Laplace posterior around it.
        blocks: names of the parameters of every block.
        precision: where prior precisions start; that of parameters in no block stays there.
        num_data: the number of training rows.
        modes: modules that stay in evaluation mode.
    """

    def __init__(
        self,
        draft: Posterior,
        settings: OnlineEvidence,
        around: Callable[..., LaplacePosterior],
        blocks: Mapping[str, tuple[str, ...]],
        precision: float,
        *,
        num_data: float,
        modes: Mapping[str, bool],
    ) -> None:
        super().__init__(draft, num_data=num_data, modes=modes)
        self.settings, self.around, self.start = settings, around, precision
        self.names = list(trainable(draft.network))
        self.block_of = {name: block for block, names in blocks.items() for name in names}
        self.turns = EvidenceTurns(epochs=0, steps=[], values=[], precisions=[], best=0)
        self.best: dict[str, Tensor] = {}
        self.present = dict.fromkeys(blocks, precision)
        like = next(iter(trainable(draft.network).values()))
        self.register_buffer("precisions", like.new_full((len(self.names),), precision), persistent=False)
        likelihood = draft.likelihood
        self.noise = isinstance(likelihood, GaussianLikelihood) and likelihood.raw_std is not None
        if self.noise:  # the marginal likelihood's, not the gradient's
            likelihood.requires_grad_(False)

    def kl(self) -> Tensor:
        """−log p(w) up to its constant: Σ ½ τ |w|²."""
        weights, precisions = self.draft.weights(), self._buffers["precisions"]
        assert precisions is not None
        squares = torch.stack([weights[name].square().sum() for name in self.names])
        return 0.5 * (precisions * squares).sum()

    def stepper(self, training: Training, plan: Plan, processes: Processes, seed: int) -> "OnlineStepper":
        return OnlineStepper(self, training, plan, processes, seed)

    def turn(self, step: int) -> None:
        """Move prior and noise to where the marginal likelihood is larger, and keep the state if it is the best.

        Args:
            step: the number of steps made.
        """
        with warnings.catch_warnings():  # of a network on its way
            warnings.simplefilter("ignore", DubitoWarning)
            posterior = self.around(detached(self.draft), self.present, step, trained=not self.noise)
            changes = best_prior(posterior, prior=True, per_layer=self.settings.per_layer, noise=self.noise)
        best, most = changes["prior_precision"], self.settings.step
        wanted: dict[str, Any] = best if isinstance(best, dict) else dict.fromkeys(self.present, best)
        present = {
            name: math.exp(math.log(value) + max(-most, min(most, math.log(wanted[name] / value))))
            for name, value in self.present.items()
        }
        moved = posterior._with(**{**changes, "prior_precision": present})
        value = moved.log_marginal_likelihood()
        self.move(present)
        if self.noise:
            self._take_noise(moved)
        turns = self.turns
        turns["steps"].append(step)
        turns["values"].append(value)
        turns["precisions"].append(present)
        if math.isfinite(value) and (not self.best or value > turns["values"][turns["best"]]):
            turns["best"] = len(turns["values"]) - 1
            self.best = {name: tensor.detach().clone() for name, tensor in self.draft.stored().items()}

    def move(self, present: dict[str, float]) -> None:
        """Train on under these prior precisions of blocks."""
        self.present, buffer = present, self._buffers["precisions"]
        assert buffer is not None
        values = [present.get(self.block_of.get(name, ""), self.start) for name in self.names]
        buffer.copy_(torch.tensor(values, dtype=torch.float64).to(buffer.dtype))

    def _take_noise(self, moved: LaplacePosterior) -> None:
        ours, theirs = self.draft.likelihood, moved.likelihood
        assert isinstance(ours, GaussianLikelihood) and isinstance(theirs, GaussianLikelihood)
        assert isinstance(ours.raw_std, Tensor)
        std = theirs.std() if theirs.scale is None else theirs.std() / theirs.scale
        with torch.no_grad():
            ours.raw_std.copy_(inverse_softplus(std.reshape(ours.raw_std.shape)))

    def posterior(self) -> Posterior:
        """The point of the best turn."""
        draft = duplicate(self.draft)
        put(draft.stored(), self.best)
        return draft.finished()


class OnlineStepper(GradientStepper):
    """Gradient descent with a turn after some epochs."""

    objective: OnlineObjective

    def __init__(
        self, objective: OnlineObjective, training: Training, plan: Plan, processes: Processes, seed: int
    ) -> None:
        if training.early_stopping is not None:
            raise ConfigError(
                "evidence= keeps the weights of the largest marginal likelihood, early_stopping those of the least "
                "validation loss; leave one of them out"
            )
        super().__init__(objective, training, plan, processes, seed)

    def close_epoch(self, step: int, last: bool) -> None:
        super().close_epoch(step, last)
        turns, settings = self.objective.turns, self.objective.settings
        turns["epochs"] += 1
        past = turns["epochs"] - settings.burn_in
        if last or (past > 0 and past % settings.every == 0):
            self.objective.turn(step)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        best = {f"best/{name}": tensor for name, tensor in self.objective.best.items()}
        return {**tensors, **best}, {**facts, "evidence": dict(self.objective.turns)}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        key, others = "best/", {name: value for name, value in facts.items() if name != "evidence"}
        conform(facts.get("evidence"), EvidenceTurns, "the turns of the marginal likelihood")
        best = {name[len(key) :]: tensor for name, tensor in tensors.items() if name.startswith(key)}
        objective = self.objective
        if best or facts["evidence"]["steps"]:
            check_forms(best, forms_of(objective.draft.stored()), "the best weights")
        objective.turns, objective.best = EvidenceTurns(**facts["evidence"]), best
        if objective.turns["precisions"]:
            objective.move(dict(objective.turns["precisions"][-1]))
        super().restore({name: tensor for name, tensor in tensors.items() if not name.startswith(key)}, others)

"""What validation rows choose by linearised predictions: the prior precision in a fit, the data scale in `tuned`."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...distributions import SparseInformationNormal, StructuredNormal
from ...distributions.structured import total
from ...errors import DataError, warn
from ...fitting import checked_rows, read_batches
from ...inputs import Batch
from ...posterior import MAX_ROWS
from ...sources import Source
from .linearised import needs_pairs, predictive
from .shares import BlockNormals
from .structures import INF
from .tuning import HIGHEST

if TYPE_CHECKING:
    from .posterior import LaplacePosterior

#: Prior precisions that a fit chooses from, over that of the weights themselves: half decades.
FACTORS = tuple(10 ** (power / 2) for power in range(11))
#: What a row may lose against the network at the centre, in nats, its mean and one standard error together.
CLASSES_MARGIN, REALS_MARGIN = 0.01, 0.03
#: The share of the epistemic part in all uncertainty below which there is none to speak of.
LEAST_SHARE = 0.01


def chosen_precision(posterior: "LaplacePosterior", validation: Source, seed: int) -> dict[str, Any]:
    """The details of a posterior with the widest prior that costs the validation rows nothing to speak of.

    From the precision of the weights themselves upwards, the first of a grid at which the mean loss of a row against
    the network at the centre, and one standard error of it, paired over rows, stay below the margin; if none does,
    the last resort is a precision that leaves no uncertainty. The negative log-likelihood alone identifies hardly any
    precision, and its least value leaves no uncertainty where some costs nothing.

    Args:
        posterior: at the precision of the weights themselves.
        validation: checked rows with targets.
        seed: of what loaders draw.
    """
    start = float(posterior.details["prior_precision"])
    grid = [start * factor for factor in FACTORS if start * factor < HIGHEST] or [HIGHEST]
    # A precision of INF is a factorisation, and a pass costs little beside it; others share one pass.
    groups = [[precision] for precision in grid] if isinstance(posterior.method.structure, INF) else [grid]
    margin = REALS_MARGIN if needs_pairs(posterior.likelihood) else CLASSES_MARGIN
    record: dict[str, Any] = {"grid": [], "losses": [], "standard_errors": [], "shares": [], "margin": margin}
    taken = None
    for group in groups:
        batches = read_batches(validation, seed, MAX_ROWS, False, "validation")
        losses, shares = row_losses(posterior, batches, group)
        centre, differences = losses[-1], losses[:-1] - losses[-1]
        means, errors = differences.mean(1), differences.std(1) / math.sqrt(len(centre))
        record["grid"] += group
        record["losses"] += means.tolist()
        record["standard_errors"] += errors.tolist()
        record["shares"] += shares.tolist()
        record |= {"centre_loss": float(centre.mean()), "rows": len(centre)}
        passed = (means + errors <= margin).nonzero().flatten().tolist()
        if passed:
            taken = group[passed[0]]
            break
    share = 0.0 if taken is None else record["shares"][record["grid"].index(taken)]
    record |= {"taken": taken or HIGHEST, "share": share, "no_uncertainty": share < LEAST_SHARE}
    if taken is None:
        warn(
            f"every prior precision from {grid[0]:.3g} to {grid[-1]:.3g} costs the {record['rows']} validation rows "
            f"more than {margin:g} nats a row against the network itself, so that its weights get no uncertainty; give "
            "more validation rows, subset=last_layer or prior_precision="
        )
    return {"prior_precision": record["taken"], "precision_choice": record}


def described(choice: dict[str, Any]) -> str:
    """A line on the choice, for `summary`."""
    line = (
        f"prior precision {choice['taken']:.4g} by {choice['rows']} validation rows, {choice['share']:.1%} of their "
        "uncertainty epistemic"
    )
    return f"{line}: no uncertainty about weights" if choice["no_uncertainty"] else line


def row_losses(
    posterior: "LaplacePosterior", batches: Iterable[Batch], precisions: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihoods [P + 1, rows] at prior precisions, the last at the centre, and epistemic shares [P].

    Args:
        posterior: whose curvature is taken.
        batches: rows, read once.
        precisions: of the prior.
    """
    candidates = [Rescaled(posterior, prior_precision=precision) for precision in precisions]
    losses, parts = [], []
    for batch, outputs, covariances in linearised_outputs(posterior, batches, candidates, MAX_ROWS):
        centre = torch.zeros_like(covariances[0])
        judged: list[Any] = [predictive(posterior.likelihood, outputs, part) for part in (*covariances, centre)]
        rows = [-batch.weighted(p.log_prob(batch.targets).detach()).cpu().double() for p in judged]
        losses.append(torch.stack([values.reshape(len(values), -1).mean(1) for values in rows]))
        uncertainty = [
            torch.stack([batch.weighted(part).sum(0) for part in (p.epistemic, p.aleatoric)]) for p in judged[:-1]
        ]
        parts.append(torch.stack(uncertainty).detach().cpu().double())
    values = torch.cat(losses, 1)
    if values.shape[1] < 2 or not values[-1].isfinite().all():
        raise DataError(
            "validation rows choose the prior precision, which takes 2 rows or more that the network gives a finite "
            f"likelihood, got {values.shape[1]} with a mean log-likelihood of {-float(values[-1].mean()):.4g}; give "
            "others, or prior_precision="
        )
    epistemic, aleatoric = torch.stack(parts).sum(0).reshape(len(precisions), 2, -1).unbind(1)
    return values, (epistemic / (epistemic + aleatoric).clamp(min=1e-300)).mean(1)


def linearised_outputs(
    posterior: "LaplacePosterior", batches: Iterable[Batch], candidates: Sequence[BlockNormals], max_rows: int
) -> Iterator[tuple[Batch, Tensor, list[Tensor]]]:
    """Each batch, its outputs, and their covariances (of classes: variances) under every candidate, in one pass."""
    read = None
    for batch in batches:
        inputs = posterior.readable(batch.inputs)
        read = read or posterior.linearised(inputs)
        yield batch, *read(inputs, candidates, max_rows, pairs=needs_pairs(posterior.likelihood))


def best_scale(
    posterior: "LaplacePosterior", before: "LaplacePosterior", validation: Any, scales: Sequence[float], max_rows: int
) -> float:
    """The data scale whose linearised predictions of the validation rows are likeliest; the rows are read once.

    Args:
        posterior: with its prior chosen.
        before: the posterior before that: a warning says if the rows speak for it.
        validation: rows with targets.
        scales: data scales to choose from, over the number of data.
        max_rows: rows that go through the network at once.
    """
    network, likelihood = posterior.network, posterior.likelihood
    batches = checked_rows(network, likelihood, validation, seed=0, max_rows=max_rows, whole=False, name="validation")
    candidates = [Rescaled(posterior, data_scale=scale * posterior.num_data) for scale in scales]
    judges = [likelihood] * len(scales) + [before.likelihood]
    nll, rows = [0.0 for _ in judges], 0
    posteriors = [*candidates, before.normals]
    for batch, outputs, covariances in linearised_outputs(posterior, batches, posteriors, max_rows):
        rows += batch.total_weight()
        for index, (judge, covariance) in enumerate(zip(judges, covariances, strict=True)):
            nll[index] -= float(total(batch.weighted(predictive(judge, outputs, covariance).log_prob(batch.targets))))
    *scores, present = nll
    if present < min(scores):
        warn(
            f"the validation rows speak against the prior precision of the marginal likelihood: their negative "
            f"log-likelihood is {min(scores) / rows:.4g} a row at the best data scale, and {present / rows:.4g} "
            "without tuning; of a network that fits its data too well it asks too wide a prior, and tuned(prior=False, "
            "validation=...) keeps the present one"
        )
    return candidates[scores.index(min(scores))].data_scale


class Rescaled:
    """A posterior's distributions at another data scale or prior precision; what is costly to build is stored."""

    def __init__(
        self, posterior: "LaplacePosterior", *, data_scale: float | None = None, prior_precision: float | None = None
    ) -> None:
        self.posterior, self.prior_precision = posterior, prior_precision
        self.data_scale = data_scale or posterior.data_scale
        self._stored: dict[str, tuple[StructuredNormal, ...]] = {}

    def __call__(self, name: str) -> tuple[StructuredNormal, ...]:
        if name in self._stored:
            return self._stored[name]
        num_data = self.data_scale / self.posterior.details["noise_factor"]
        precision = self.prior_precision or self.posterior.prior_precisions[name]
        unscaled = self.posterior.normals(name)
        normals = tuple(normal.rescaled(num_data=num_data, prior_precision=precision) for normal in unscaled)
        if isinstance(normals[0], SparseInformationNormal):
            self._stored[name] = normals
        return normals

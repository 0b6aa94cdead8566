"""Monte Carlo dropout on the UCI tables as Gal and Ghahramani ran it: a grid search, a refit, a mixture.

Settings and procedure are those of their published code since its revision of 2018, whose results BALI's tables
quote: for every split, rate and noise precision are chosen by the log-likelihood of the last fifth of the
training rows, and a network is trained anew on all of them. One thing differs: the precision τ enters training
only through a weight decay below 1e-5, so one training per rate serves all precisions of the grid; and the networks
that choose may be trained for fewer epochs (`search_epochs`).

A step of so small a network costs its overhead, not its arithmetic: networks are trained side by side.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dubito import Gaussian, MCDropout, metrics, seeds
from dubito.data import Part, Scaling
from dubito.errors import require_count, require_fraction, require_positive
from dubito.inputs import Batch
from dubito.posterior import Posterior

from ...runner import provenance
from ...runner.experiment import Outcome
from ...settings import explicit

#: Outputs of draws that are held at once while rate and precision are chosen: 2 GB.
MOST_OUTPUTS = 500_000_000


@dataclass(frozen=True, kw_only=True)
class DropoutSearch:
    """Settings of the search; the defaults are the authors' own.

    Args:
        precisions: the grid of noise precisions τ, in original units of the targets.
        search_epochs: passes while rate and precision are chosen; None is `epochs`.
        rates: the grid of dropout rates, on the inputs of both layers.
        hidden: units of the hidden layer.
        epochs: passes over the training rows: 40, times the factor 100 of the runs with one hidden layer.
        batch_size: rows per step; a shorter last batch weighs as much as a full one.
        lr: Adam's learning rate.
        eps: Adam's guard against division by 0, Keras's own.
        lengthscale: l of the prior; kernels are penalised by l² (1 − p) / (2 N τ) ‖W‖².
        validation: fraction of the training rows, the last ones, that choose rate and precision.
        num_samples: draws of a prediction.
    """

    precisions: tuple[float, ...]
    search_epochs: int | None = None
    rates: tuple[float, ...] = (0.005, 0.01, 0.05, 0.1)
    hidden: int = 50
    epochs: int = 4000
    batch_size: int = 128
    lr: float = 1e-3
    eps: float = 1e-7
    lengthscale: float = 1e-2
    validation: float = 0.2
    num_samples: int = 10_000

    def __post_init__(self) -> None:
        require_positive(**{f"precisions[{i}]": value for i, value in enumerate(self.precisions)})
        for rate in self.rates:
            require_fraction(zero=False, rate=rate)
        require_count(hidden=self.hidden, epochs=self.epochs)
        if self.search_epochs is not None:
            require_count(search_epochs=self.search_epochs)
        require_count(batch_size=self.batch_size, num_samples=self.num_samples)
        require_positive(lr=self.lr, eps=self.eps, lengthscale=self.lengthscale)
        require_fraction(zero=False, validation=self.validation)


@dataclass(frozen=True)
class Member:
    """One network of a stack: the table it learns from (its place among the parts), dropout rate and noise."""

    part: int
    rate: float
    precision: float


class Stack(nn.Module):
    """Networks with one hidden layer, side by side: output m is member m's, from its own table's columns.

    Members share nothing, so the gradient of a loss that sums over outputs trains each as if alone.

    Args:
        features: columns of a table.
        hidden: units of the hidden layer.
        members: those of one rate stand together.
        seeds_of_parts: a table's members start from weights of their own, whatever stands beside them.
    """

    parts: Tensor

    def __init__(self, features: int, hidden: int, members: Sequence[Member], seeds_of_parts: Sequence[int]) -> None:
        super().__init__()
        rates = list(dict.fromkeys(member.rate for member in members))
        groups = [[member for member in members if member.rate == rate] for rate in rates]
        assert [member for group in groups for member in group] == list(members)
        self.sizes = [len(group) for group in groups]
        self.register_buffer("parts", torch.tensor([member.part for member in members]))
        self.inner = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        self.outer = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        self.kernel1 = nn.Parameter(torch.empty(len(members), features, hidden))
        self.bias1 = nn.Parameter(torch.zeros(len(members), 1, hidden))
        self.kernel2 = nn.Parameter(torch.empty(len(members), hidden, 1))
        self.bias2 = nn.Parameter(torch.zeros(len(members), 1, 1))
        for m, member in enumerate(members):
            stream = seeds.generator(seeds_of_parts[member.part], "initial weights", repr(member.rate))
            for kernel in (self.kernel1[m], self.kernel2[m]):
                nn.init.xavier_uniform_(kernel, generator=stream)  # Keras's default

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, parts, features] to [B, members]."""
        own = inputs.transpose(0, 1).index_select(0, self.parts)  # [members, B, features]
        units = torch.baddbmm(self.bias1, self._dropped(self.inner, own), self.kernel1).relu()
        return torch.baddbmm(self.bias2, self._dropped(self.outer, units), self.kernel2).squeeze(2).T

    def _dropped(self, layers: nn.ModuleList, values: Tensor) -> Tensor:
        """Each rate's layer on its own members."""
        pieces = values.split(self.sizes)
        return torch.cat([layer(piece) for layer, piece in zip(layers, pieces, strict=True)])


@dataclass(frozen=True)
class Fitted:
    """A posterior over the members of a stack, with the scalings of the tables they were trained on."""

    posterior: Posterior
    members: tuple[Member, ...]
    inputs: tuple[Scaling, ...]
    targets: tuple[Scaling, ...]

    def draws(self, inputs: Sequence[Tensor], num_samples: int, seed: int) -> Iterator[tuple[Member, Tensor]]:
        """Each member with its outputs for the rows of its table, all in original units, [S, B, 1]."""
        scaled = [scaling.apply(table).float() for scaling, table in zip(self.inputs, inputs, strict=True)]
        outputs = self.posterior.sample_outputs(torch.stack(scaled, 1), num_samples, seed=seed)
        for m, member in enumerate(self.members):  # one at a time: in double precision all would be many
            yield member, self.targets[member.part].undo(outputs[..., m : m + 1].to(inputs[0].dtype))


def search(
    trains: Sequence[Part],
    tests: Sequence[Part],
    settings: DropoutSearch,
    *,
    seeds_of_parts: Sequence[int],
    steps: int | None = None,
) -> list[Outcome]:
    """For each table: choose rate and precision on its last training rows, train on all, judge its test rows.

    Args:
        trains: training rows in original units, in the order of the split; as many in every table.
        tests: test rows likewise.
        settings: of the search.
        seeds_of_parts: one per table.
        steps: ends every training after so many steps, and every prediction after as many draws.
    """
    kept = int((1 - settings.validation) * len(trains[0].targets))
    firsts = [Part(part.inputs[:kept], part.targets[:kept]) for part in trains]
    asides = [Part(part.inputs[kept:], part.targets[kept:]) for part in trains]
    middle = settings.precisions[len(settings.precisions) // 2]
    members = tuple(Member(part, rate, middle) for rate in settings.rates for part in range(len(trains)))
    own = [seeds.derived(seed, "search") for seed in seeds_of_parts]
    grid = fit(firsts, members, replace(settings, epochs=settings.search_epochs or settings.epochs), own, steps)
    num_samples = settings.num_samples if steps is None else steps
    scores = graded(grid, asides, settings.precisions, num_samples, own[0])
    chosen = [Member(part, *max(found, key=found.__getitem__)) for part, found in enumerate(scores)]
    chosen = tuple(sorted(chosen, key=lambda member: (member.rate, member.part)))
    own = [seeds.derived(seed, "refit") for seed in seeds_of_parts]
    refit = fit(trains, chosen, settings, own, steps)
    outcomes = {
        member.part: outcome(tests[member.part].targets, means, member, scores[member.part])
        for member, means in refit.draws([part.inputs for part in tests], num_samples, own[0])
    }
    return [outcomes[part] for part in range(len(trains))]


def graded(
    grid: Fitted, parts: Sequence[Part], precisions: Sequence[float], num_samples: int, seed: int
) -> list[dict[tuple[float, float], float]]:
    """The log-likelihood of each table's rows by rate and precision; many rows are read piece by piece."""
    scores: list[dict[tuple[float, float], float]] = [{} for _ in parts]
    count = len(parts[0].targets)
    at_once = max(1, MOST_OUTPUTS // (num_samples * len(grid.members)))
    for start in range(0, count, at_once):
        piece = [Part(part.inputs[start : start + at_once], part.targets[start : start + at_once]) for part in parts]
        share = len(piece[0].targets) / count
        stream = seeds.derived(seed, start) if start else seed
        for member, means in grid.draws([part.inputs for part in piece], num_samples, stream):
            own = scores[member.part]
            for precision in precisions:
                key, score = (member.rate, precision), log_likelihood(piece[member.part].targets, means, precision)
                own[key] = own.get(key, 0.0) + share * score
    return scores


def outcome(targets: Tensor, means: Tensor, member: Member, scores: dict[tuple[float, float], float]) -> Outcome:
    """A table's result: errors of the mixture's mean, and its likelihood."""
    return Outcome(
        metrics={
            "rmse": metrics.rmse(targets, means.mean(0)),
            "log_likelihood": log_likelihood(targets, means, member.precision),
        },
        details={
            "rate": member.rate,
            "precision": member.precision,
            "validation": [
                {"rate": rate, "precision": precision, "log_likelihood": score}
                for (rate, precision), score in scores.items()
            ],
        },
    )


def log_likelihood(targets: Tensor, means: Tensor, precision: float) -> float:
    """Mean over rows of log 1/S Σ_s N(y; m_s, 1/τ), targets [B, 1], means [S, B, 1]."""
    return metrics.mixture_log_prob(targets, means, means.new_tensor(precision**-0.5))


def fit(
    parts: Sequence[Part],
    members: tuple[Member, ...],
    settings: DropoutSearch,
    seeds_of_parts: Sequence[int],
    steps: int | None = None,
) -> Fitted:
    """Train a stack on tables in original units.

    The library's objective in a loop of its own, because the authors' steps weigh a short last batch as a full
    one, where the library's loop weighs rows alike.
    """
    inputs_by = tuple(standardising(part.inputs) for part in parts)
    targets_by = tuple(standardising(part.targets) for part in parts)
    inputs = torch.stack([by.apply(part.inputs) for by, part in zip(inputs_by, parts, strict=True)], 1).float()
    scaled = [by.apply(part.targets) for by, part in zip(targets_by, parts, strict=True)]
    targets = torch.cat([scaled[member.part] for member in members], 1).float()
    num_data, features = len(inputs), inputs.shape[2]
    # With noise of variance ½ the negative log-likelihood is their loss, (y − f)², up to a constant; the
    # precision of the noise proper belongs to the prediction.
    method, noise = explicit(MCDropout, rate=None), explicit(Gaussian, std=0.5**0.5)
    stack = Stack(features, settings.hidden, members, seeds_of_parts)
    provenance.record(method, stack, (inputs, targets), noise, optimizer="Adam", search=settings)
    objective = method.build(stack, noise, num_data)
    objective.bind(inputs)
    network = objective.draft.network
    kernels = [network.get_parameter(name) for name in ("kernel1", "kernel2")]
    # d/dW l² (1 − p)/(2 N τ) ‖W‖² = l² (1 − p)/(N τ) W
    decay = torch.tensor([settings.lengthscale**2 * (1 - m.rate) / (num_data * m.precision) for m in members])[
        :, None, None
    ]
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.lr, eps=settings.eps, fused=True)
    made, end = 0, math.inf if steps is None else steps
    with seeds.forked(seeds_of_parts[0], "masks and order"):
        for _ in range(settings.epochs):
            for rows in torch.randperm(num_data).split(settings.batch_size):
                if made == end:
                    break
                optimizer.zero_grad(set_to_none=True)
                objective.batch_loss(Batch(inputs[rows], targets[rows]), 1.0, None).total.backward()
                for kernel in kernels:
                    assert kernel.grad is not None
                    kernel.grad.addcmul_(kernel.detach(), decay)
                optimizer.step()
                made += 1
    return Fitted(objective.posterior(), members, inputs_by, targets_by)


def standardising(values: Tensor) -> Scaling:
    """The scaling of rows to mean 0 and variance 1 per column; constant columns are only shifted."""
    std = values.std(0, unbiased=False)
    return Scaling(values.mean(0), torch.where(std > 0, std, torch.ones_like(std)))

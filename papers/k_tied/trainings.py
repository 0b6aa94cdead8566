"""What the k-tied paper's experiments share: how networks are trained, kept, and judged on test rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito import He, KTied, MeanField, Reparameterised, metrics
from dubito.data import Part
from dubito.metrics import Over
from dubito.training import KL, Cosine, Training
from dubito.training.schedules import Schedule
from dubito.weight_normals import NormalPosterior
from dubito.weight_normals.estimators import Estimator

from ..runner import provenance
from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Published, Scale
from ..runner.trained import checkpoint as trained_at
from ..settings import explicit
from .tasks import Rows, Task, generate_cell, load_cell

#: To be raised when a change of the code changes what training gives; trained networks are then trained anew.
REVISION = 2


@dataclass(frozen=True, kw_only=True)
class Regime:
    """One training of a network [appendix D.2, D.4].

    Args:
        task: network and rows.
        rank: k, or None for mean field.
        epochs: passes over the training rows.
        lr: learning rate of Adam, for the means.
        variational_lr: for standard deviations and factors; None takes `lr`.
        schedule: of both rates.
        kl_slope: what each batch adds to the divergence's weight, which moves every 100 batches; None for none.
        kl_warmup: epochs over which its weight rises from 0 in a straight line where there is no slope.
        prior_std: σ_p.
        initial_std: where standard deviations start.
        initial_spread: standard deviation of their logarithms, which is about 0.001 / 0.01 for mean field.
        max_std: the largest standard deviation; None for any.
        estimator: where the noise is put.
        batch_size: rows per step.
        num_samples: draws for the test metrics.
    """

    task: Task
    rank: int | None = None
    epochs: int = 300
    lr: float = 3e-3
    variational_lr: float | None = None
    schedule: Schedule = explicit(Cosine)
    kl_slope: float | None = None
    kl_warmup: float = 0.0
    prior_std: float | He = 0.2
    initial_std: float = 0.01
    initial_spread: float = 0.1
    max_std: float | None = None
    estimator: Estimator = explicit(Reparameterised)
    batch_size: int = 1024
    num_samples: int = 100

    def method(self) -> MeanField | KTied:
        """Mean field or the k-tied Normal, without our halved rate for factors."""
        common = {
            "prior_std": self.prior_std,
            "initial_std": self.initial_std,
            "initial_spread": self.initial_spread,
            "max_std": self.max_std,
            "estimator": self.estimator,
            "subset": self.task.subset,
        }
        if self.rank is None:
            return explicit(MeanField, **common)
        return explicit(KTied, rank=self.rank, tied=self.task.tied, match_rates=False, **common)

    def training(self, num_data: int, steps: int | None) -> Training:
        """The training, ended after `steps` where given."""
        kl = explicit(KL, warmup=self.kl_warmup)
        if self.kl_slope is not None:
            batches = -(-num_data // self.batch_size)
            kl = explicit(KL, warmup=1 / (self.kl_slope * batches), every=100)
        return explicit(
            Training,
            epochs=self.epochs if steps is None else None,
            iterations=steps,
            batch_size=self.batch_size,
            lr=self.lr,
            variational_lr=self.variational_lr,
            schedule=self.schedule,
            kl=kl,
        )


#: The last training of a rehearsal: the variants that share it follow each other.
_rehearsed: dict[tuple, tuple[NormalPosterior, list]] = {}


def trained(regime: Regime, rows: Rows, seed: int, steps: int | None) -> NormalPosterior:
    """A trained posterior; a whole run is kept in the user's cache, where other tables find it again.

    Args:
        regime: how it is trained.
        rows: as its task gives them.
        seed: of the start, the order of rows and the noise.
        steps: ends it after so many; None for all.
    """
    if steps is None:
        return _fit(regime, rows, seed, None, trained_at(type(regime.task).__name__, REVISION, regime, seed))
    key = (regime, seed, steps, *rows.train.inputs.flatten()[:8].tolist())
    if key not in _rehearsed:
        _rehearsed.clear()
    return provenance.shared(_rehearsed, key, partial(_fit, regime, rows, seed, steps, None))


def _fit(regime: Regime, rows: Rows, seed: int, steps: int | None, checkpoint: Path | None) -> NormalPosterior:
    posterior = provenance.fit(
        regime.method(),
        regime.task.network(seed),
        rows.train,
        regime.task.likelihood(),
        training=regime.training(len(rows.train.targets), steps),
        checkpoint=checkpoint,
        seed=seed,
        progress=False,
    )
    assert isinstance(posterior, NormalPosterior)
    return posterior


@torch.no_grad()
def tested(
    posterior: NormalPosterior, part: Part, num_data: int, num_samples: int, seed: int
) -> tuple[dict[str, float], dict[str, float]]:
    """−ELBO per row, then nll, accuracy, Brier score and ECE of the mean over draws; beside them standard errors.

    Args:
        posterior: whose.
        part: the rows to test on.
        num_data: training rows, over which the divergence is shared out.
        num_samples: draws.
        seed: of the draws.
    """
    targets = part.targets.flatten().long()
    log_probs = class_logits(posterior.sample_outputs(part.inputs, num_samples, seed=seed)).log_softmax(-1)  # [S, B, C]
    expected = -log_probs[:, torch.arange(len(targets)), targets].double().mean(0)
    probs = log_probs.double().exp().mean(0)
    by_row = {
        "nll": metrics.nll_per_example(probs, targets),
        "accuracy": 100 * metrics.correct_per_example(probs, targets).double(),
        "brier": metrics.brier_per_example(probs, targets) - 1,  # TensorFlow Probability's  [Table 3]
        "expected_nll": expected,
    }
    means = {name: float(values.mean()) for name, values in by_row.items()}
    # −ELBO / N = KL / N + E_q[−log p(y | x, w)], on test rows  [Eq. 2]
    divergence = float(posterior.kl()) / num_data
    judged = {"neg_elbo": divergence + means.pop("expected_nll"), **means, "ece": metrics.ece(probs, targets)}
    errors = {f"{name}_se": float(values.std() / len(values) ** 0.5) for name, values in by_row.items()}
    return judged, {"kl_per_row": divergence, **errors}


def class_logits(outputs: Tensor) -> Tensor:
    """Logits of classes [S, B, C]; one logit [S, B, 1] is that of the second of two."""
    return outputs if outputs.shape[-1] > 1 else torch.cat([torch.zeros_like(outputs), outputs], -1)


def experiment(
    name: str,
    scales: Mapping[str, Scale],
    run: Callable[[Sequence[Cell], Sequence[Rows], Any, int | None], list[Outcome]],
    shares: Callable[[Cell], tuple] | None = None,
    revision: int = REVISION,
) -> Experiment:
    """An experiment on the paper's networks and data."""
    return Experiment(
        paper="k_tied",
        name=name,
        scales=scales,
        load=load_cell,
        generate=generate_cell,
        run=run,
        shares=shares,
        revision=revision,
    )


def better_than_rank_one(data: str, text: str, numbers: Mapping[tuple[str, str, str], Published]) -> tuple[Claim, ...]:
    """That ranks 2 and 3 have a lower −ELBO and NLL than rank 1, where they have in the paper.

    Args:
        data: where.
        text: in words, with places for rank and metric.
        numbers: the paper's, of one data set.
    """
    printed = {(method, metric): number.value for (_, method, metric), number in numbers.items()}
    return tuple(
        Claim(text=text.format(rank, words), metric=metric, better=f"{rank}-tied", than="1-tied", data=(data,))
        for rank in (2, 3)
        for metric, words in (("neg_elbo", "−ELBO"), ("nll", "NLL"))
        if printed[f"{rank}-tied", metric] < printed["1-tied", metric]
    )


METRICS = (
    Metric(name="neg_elbo", title="−ELBO", lower_is_better=True),
    Metric(name="nll", title="NLL", lower_is_better=True),
    Metric(name="accuracy", title="accuracy, %", lower_is_better=False),
)
METHODS = ("mean-field", "1-tied", "2-tied", "3-tied")
RANKS = dict(zip(METHODS, (None, 1, 2, 3), strict=True))
PLUS_MINUS = (
    "standard error over test examples, as the binomial of its accuracies shows, though the paper says over 100 draws"
)


def published(printed: str, names: tuple[str, ...], data: str) -> dict[tuple[str, str, str], Published]:
    """The paper's numbers of one data set: rows `data method value±error …`, errors over examples."""
    numbers = {}
    for where, method, *entries in map(str.split, printed.strip().splitlines()):
        for name, entry in zip(names, entries, strict=True):
            value, _, error = entry.partition("±")
            exact = Published(float(value))
            if where == data:
                numbers[data, method, name] = replace(exact, error=float(error), over=Over.EXAMPLES) if error else exact
    return numbers

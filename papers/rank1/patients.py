"""Differences between methods by a bootstrap over patients, for metrics that are no means over them too.

A resample says how often each patient is drawn, [R, N]; every metric is a function of these counts, so all resamples
are judged at once and both methods by the same patients. A method's value is its mean over seeds.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dubito import metrics, seeds
from dubito.errors import DataError
from dubito.metrics import Over, PairedDifference

NUM_BINS = 15


def patient_differences(
    first: Tensor, second: Tensor, died: Tensor, *, num_resamples: int = 2_000, level: float = 0.95, seed: int = 0
) -> dict[str, PairedDifference]:
    """First method minus second, by metric.

    Args:
        first: probabilities of death under one method, [seeds, N].
        second: those of the same patients under the other.
        died: who did, [N].
        num_resamples: draws of patients with replacement.
        level: of the intervals.
        seed: of the draws.
    """
    for name, probs in (("first", first), ("second", second)):
        if probs.ndim != 2 or probs.shape[1] != len(died):
            raise DataError(f"{name} must be [seeds, {len(died)}], got {list(probs.shape)}")
    size, stream = len(died), seeds.generator(seed, "patients")
    once = torch.ones(1, size, dtype=torch.float64)
    picked = torch.randint(size, (num_resamples, size), generator=stream)
    counts = torch.zeros(num_resamples, size, dtype=torch.float64)
    counts.scatter_add_(1, picked, once.expand(num_resamples, -1))

    def differences_of(times: Tensor) -> dict[str, Tensor]:
        theirs = weighted(second, died, times)
        return {name: ours - theirs[name] for name, ours in weighted(first, died, times).items()}

    exact, drawn = differences_of(once), differences_of(counts)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    found = {}
    for name, differences in drawn.items():
        lower, upper = differences.quantile(tails).tolist()
        found[name] = PairedDifference(
            difference=float(exact[name]),
            standard_error=float(differences.std()),
            lower=lower,
            upper=upper,
            level=level,
            over=Over.EXAMPLES,
        )
    return found


def weighted(probs: Tensor, died: Tensor, counts: Tensor) -> Mapping[str, Tensor]:
    """NLL, area under the precision-recall curve and ECE, each [R], of patients that count so many times each."""
    probs, died = probs.double(), died.double()
    nll = torch.stack([metrics.nll_per_example(each, died.long()) for each in probs]).mean(0)
    return {
        "nll": counts @ nll / counts.sum(1),
        "auc_pr": torch.stack([_average_precision(each, died, counts) for each in probs]).mean(0),
        "ece": torch.stack([_ece(each, died, counts) for each in probs]).mean(0),
    }


def _average_precision(probs: Tensor, died: Tensor, counts: Tensor) -> Tensor:
    """Σ (recall_t − recall_{t−1}) precision_t over the distinct thresholds t, from the highest."""
    falling, order = probs.sort(descending=True)
    ends = torch.cat([falling[1:] != falling[:-1], torch.ones(1, dtype=torch.bool)])  # ties fall together
    found = (counts * died)[:, order].cumsum(1)[:, ends]
    called = counts[:, order].cumsum(1)[:, ends]
    precision = found / called.clamp(min=1)  # nobody called: nothing is found there either
    return (found.diff(dim=1, prepend=found.new_zeros(len(found), 1)) * precision).sum(1) / found[:, -1]


def _ece(probs: Tensor, died: Tensor, counts: Tensor) -> Tensor:
    """Σ_m |Σ_{i in m} n_i (hit_i − confidence_i)| / Σ n_i, with bins as in `metrics.ece`."""
    confidence = torch.maximum(probs, 1 - probs)
    hits = (probs > 0.5).double() == died
    limits = torch.arange(1, NUM_BINS, dtype=torch.float64) / NUM_BINS
    bins = torch.nn.functional.one_hot(torch.searchsorted(limits, confidence), NUM_BINS)
    gaps = (hits.double() - confidence)[:, None] * bins
    return (counts @ gaps).abs().sum(1) / counts.sum(1)

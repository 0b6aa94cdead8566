"""What a posterior says of CIFAR-10's images, clean, corrupted and foreign, and how well it is calibrated."""

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito import metrics
from dubito.metrics import reliability_curve
from dubito.posterior import Posterior
from dubito.shifts.constants import SEVERITIES

from ..runner.scores import area
from .images import Pictures

#: Training images that are judged, as they are, the first so many.
TRAINED = 2_000
MEASURES: tuple[str, ...] = ("nll", "accuracy", "ece")


def log_probs(posterior: Posterior, inputs: Tensor, num_samples: int, seed: int) -> Tensor:
    """Log-probabilities of draws, [S, B, C]; draw s belongs to component s mod K."""
    return posterior.sample_outputs(inputs, num_samples, seed=seed).double().log_softmax(-1)


def mixed(draws: Tensor) -> Tensor:
    """The mixture log 1/S Σ_s p_s, [B, C], of draws [S, B, C]   [rank-1, Section 3.4, at test time]."""
    return draws.logsumexp(0) - math.log(len(draws))


def measured(logs: Tensor, labels: Tensor) -> dict[str, float]:
    """NLL in nats, accuracy in percent and ECE (15 bins) of log-probabilities [B, C]."""
    probs = logs.exp()
    return {
        "nll": -float(logs[torch.arange(len(labels)), labels].mean()),
        "accuracy": 100 * metrics.accuracy(probs, labels),
        "ece": metrics.ece(probs, labels),
    }


def by_number(draws: Tensor, labels: Tensor, components: int) -> dict[str, list[float]]:
    """Metrics of the first 1, 2, … components together, and of one alone (mean over all)."""
    owner = torch.arange(len(draws)) % components
    together = [measured(mixed(draws[owner < count]), labels) for count in range(1, components + 1)]
    alone = [measured(mixed(draws[owner == index]), labels) for index in range(components)]
    lists = {name: [row[name] for row in together] for name in MEASURES}
    return lists | {f"{name}_alone": [row[name] for row in alone] for name in MEASURES}


def disagreement(draws: Tensor, labels: Tensor, components: int) -> float:
    """Share of images that two components name differently, over their mean error rate   [rank-1, Section 3.5]."""
    owner = torch.arange(len(draws)) % components
    classes = torch.stack([mixed(draws[owner == index]).argmax(-1) for index in range(components)])
    pairs = torch.combinations(torch.arange(components))
    apart = (classes[pairs[:, 0]] != classes[pairs[:, 1]]).double().mean()
    return float(apart / (classes != labels).double().mean().clamp_min(1e-12))


def reliability(logs: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """Confidence and accuracy in 15 bins of equal width, without empty ones   [implicit, Figure 7]."""
    curve = reliability_curve(logs.exp(), labels)
    filled = curve.count > 0
    return {
        "confidence": rounded(curve.confidence[filled]),
        "accuracy": rounded(curve.accuracy[filled]),
        "count": rounded(curve.count[filled].double()),
    }


def rounded(values: Tensor) -> list[float]:
    """Numbers to draw from."""
    return torch.round(values.double(), decimals=4).tolist()


def shifted(
    posterior: Posterior, pictures: Pictures, num_samples: int, seed: int
) -> dict[tuple[str, int], dict[str, float]]:
    """Metrics by corruption and severity."""
    return {
        key: measured(mixed(log_probs(posterior, images, num_samples, seed)), pictures.test.targets[: len(images)])
        for key, images in pictures.corrupted.items()
    }


def severities(results: Mapping[tuple[str, int], Mapping[str, float]]) -> dict[str, list[float]]:
    """Means over all corruptions at each severity   [rank-1, Figure 7]."""
    present = [severity for severity in SEVERITIES if any(at == severity for _, at in results)]
    return {
        name: [mean([row[name] for (_, at), row in results.items() if at == severity]) for severity in present]
        for name in MEASURES
    }


def mean(values: list[float]) -> float:
    """Of numbers."""
    return sum(values) / len(values)


def judged(
    posterior: Posterior, pictures: Pictures, num_samples: int, seed: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """All metrics of a posterior, and what figures are drawn from."""
    inputs, labels = pictures.test
    draws = log_probs(posterior, inputs, num_samples, seed)
    logs = mixed(draws)
    foreign = mixed(log_probs(posterior, pictures.foreign, num_samples, seed))
    corrupt = shifted(posterior, pictures, num_samples, seed)
    components = min(posterior.num_components, len(draws))
    seen = log_probs(posterior, pictures.train.inputs[:TRAINED], num_samples, seed)
    values = measured(logs, labels) | {"train_nll": measured(mixed(seen), pictures.train.targets[:TRAINED])["nll"]}
    if corrupt:
        values |= {f"c_{name}": mean([row[name] for row in corrupt.values()]) for name in MEASURES}
    values |= {"auroc": area(entropy(logs), entropy(foreign)), "bytes": float(file_bytes(posterior))}
    facts: dict[str, Any] = {"reliability": reliability(logs, labels), "severities": severities(corrupt)}
    facts["corruptions"] = {f"{name} {at}": row for (name, at), row in corrupt.items()}
    values |= {"nll_alone": values["nll"], "diversity": 0.0}
    if components > 1:
        facts["components"] = by_number(draws, labels, components)
        facts["train_components"] = by_number(seen, pictures.train.targets[:TRAINED], components)
        values["diversity"] = disagreement(draws, labels, components)
        values["nll_alone"] = mean(facts["components"]["nll_alone"])
    return values, facts


def entropy(logs: Tensor) -> Tensor:
    """Predictive entropy of every image, in nats."""
    return -(logs.exp() * logs).sum(-1)


def file_bytes(posterior: Posterior) -> int:
    """The size of the posterior's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.safetensors"
        posterior.save(path)
        return path.stat().st_size

"""What choosing rows adds to the cost of the fits of active learning, as a share of it: CPU time of one thread.

The setting of INF's Figure 5: a table of 455 × 13, 10 hidden units, Laplace around a point estimate of 1,000 steps,
one row per step. Medians of the ratio over the rounds, all cases interleaved in every round.

    python benchmarks/active.py [rounds]
"""

import json
import statistics
import sys
from pathlib import Path

import torch

from dubito import INF, KFAC, Gaussian, Laplace, MCDropout, Training
from dubito.active import BALD, Acquisition, ActiveLearning, OutputVariance, Random
from dubito.method import Method
from dubito.models import mlp

#: The most that choosing may add.
BAR = 0.10
RESULTS = Path(__file__).parent / "results" / "active.json"
CASES: dict[str, tuple[Method, Acquisition]] = {
    "laplace-inf, output variance": (Laplace(structure=INF(rank=1.0)), OutputVariance()),
    "laplace-kfac, output variance": (Laplace(structure=KFAC()), OutputVariance()),
    "mc-dropout, bald of 32 draws": (MCDropout(), BALD()),
    "laplace-inf, random": (Laplace(structure=INF(rank=1.0)), Random()),
}


def main(rounds: int = 5) -> None:
    torch.set_num_threads(1)
    stream = torch.Generator().manual_seed(0)
    pool = torch.randn(455, 13, generator=stream)
    targets = pool[:, :3].prod(1, keepdim=True) + 0.1 * torch.randn(455, 1, generator=stream)
    found: dict[str, list[float]] = {name: [] for name in CASES}
    training = Training(iterations=1000, batch_size=20, lr=1e-2)
    for seed in range(rounds):
        for name, (method, acquisition) in CASES.items():
            loop = ActiveLearning(method=method, acquisition=acquisition, steps=2, training=training)
            net = mlp(13, (10,), num_classes=1)
            curve = loop.run(net, (pool, targets), (pool[:50], targets[:50]), Gaussian(std=0.3), seed=seed)
            # the last point asks for no labels, so its fit is not one that choosing could add to
            asked = curve.points[:-1]
            spent = sum(point.acquisition_seconds for point in asked)
            found[name].append(spent / sum(point.fit_seconds for point in asked))
    medians = {name: statistics.median(own) for name, own in found.items()}
    for name, own in medians.items():
        print(f"{name:32s} {own:7.2%} of the fits, at most {BAR:.0%}: {'yes' if own <= BAR else 'NO'}")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    shares = {name: round(own, 4) for name, own in medians.items()}
    RESULTS.write_text(json.dumps({"share_of_fits": shares, "bar": BAR, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

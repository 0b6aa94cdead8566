"""What choosing rows adds to the cost of the fits of active learning, as a share of it.

The setting of INF's Figure 5: a table of 455 × 13, 10 hidden units, Laplace around a point estimate of 1,000 steps,
one row per step.
"""

import torch

from dubito import INF, KFAC, Gaussian, Laplace, MCDropout, Training
from dubito.active import BALD, Acquisition, ActiveLearning, OutputVariance, Random
from dubito.method import Method
from dubito.models import mlp

from .bars import Bar, Values, benchmark

CASES: dict[str, tuple[Method, Acquisition]] = {
    "laplace-inf, output variance": (Laplace(structure=INF(rank=1.0)), OutputVariance()),
    "laplace-kfac, output variance": (Laplace(structure=KFAC()), OutputVariance()),
    "mc-dropout, bald of 32 draws": (MCDropout(), BALD()),
    "laplace-inf, random": (Laplace(structure=INF(rank=1.0)), Random()),
}


@benchmark({name: Bar(0.10, "of the fits") for name in CASES})
def active(rounds: int) -> Values:
    stream = torch.Generator().manual_seed(0)
    pool = torch.randn(455, 13, generator=stream)
    targets = pool[:, :3].prod(1, keepdim=True) + 0.1 * torch.randn(455, 1, generator=stream)
    shares: dict[str, list[float]] = {name: [] for name in CASES}
    training = Training(iterations=1000, batch_size=20, lr=1e-2)
    for seed in range(rounds):
        for name, (method, acquisition) in CASES.items():
            loop = ActiveLearning(method=method, acquisition=acquisition, steps=2, training=training)
            net = mlp(13, (10,), num_classes=1)
            curve = loop.run(net, (pool, targets), (pool[:50], targets[:50]), Gaussian(std=0.3), seed=seed)
            # the last point asks for no labels, so its fit is not one that choosing could add to
            asked = curve.points[:-1]
            spent = sum(point.acquisition_seconds for point in asked)
            shares[name].append(spent / sum(point.fit_seconds for point in asked))
    return shares

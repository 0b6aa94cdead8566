"""INF's claim on cost: draws take O(L³) per layer, and no dense layer its O(N³): `python -m papers.inf.cost`.

One layer of n × n weights under made-up statistics. Timed are what is done once (a factorisation) and a draw, CPU
seconds of one thread, the least of some repetitions: INF along L at one n, and INF at rank 100 beside the dense Normal
along N = n². Writes cost.json beside it, from which `draw.py` draws.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dubito import seeds
from dubito.distributions import SparseInformationNormal

OUT = Path(__file__).parent / "cost.json"
#: Sides of the kept rectangle of eigenvectors, at this n; sides of the layer, at this rectangle; dense ones.
SIDE, RECTANGLES = 256, (4, 8, 16, 24, 32, 40, 56, 72)
SIDES, RECTANGLE, DENSE = (16, 32, 64, 128, 256, 512), 10, (8, 16, 24, 32, 48, 64)
REPETITIONS = 3


def seconds(work: Callable[[], object]) -> float:
    """CPU time, the least of some repetitions."""
    times = []
    for _ in range(REPETITIONS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def layer(side: int, rectangle: int) -> SparseInformationNormal:
    """Made-up eigenvectors and second moments of a layer, in INF's form."""
    stream = seeds.generator(0, "cost", side, rectangle)
    left, right = (torch.linalg.qr(torch.randn(side, rectangle, generator=stream))[0] for _ in range(2))
    eigenvalues = torch.rand(rectangle, rectangle, generator=stream)
    low_rank = left.square() @ eigenvalues @ right.square().mT
    return SparseInformationNormal(
        torch.zeros(side, side),
        left,
        right,
        eigenvalues,
        low_rank + 0.1 * torch.rand(side, side, generator=stream),
        num_data=1000.0,
        prior_precision=1.0,
    )


def sparse(side: int, rectangle: int) -> dict[str, float]:
    """INF."""
    normal, stream = layer(side, rectangle), seeds.generator(0, "draws")
    first = seconds(lambda: layer(side, rectangle).cholesky)
    making = seconds(lambda: layer(side, rectangle))
    normal.rsample(generator=stream)
    return {
        "weights": side**2,
        "size": rectangle**2,
        "factorisation": max(first - making, 0.0),
        "draw": seconds(lambda: normal.rsample(generator=stream)),
    }


def dense(side: int) -> dict[str, float]:
    """A Normal with a whole precision matrix."""
    count, stream = side**2, seeds.generator(0, "dense", side)
    root = torch.randn(count, count, generator=stream) / side
    precision = root @ root.mT + torch.eye(count)

    def draw(factor: Tensor) -> Tensor:
        noise = torch.randn(count, 1, generator=stream)
        return torch.linalg.solve_triangular(factor.mT, noise, upper=True)

    factor = torch.linalg.cholesky(precision)
    return {
        "weights": count,
        "factorisation": seconds(lambda: torch.linalg.cholesky(precision)),
        "draw": seconds(lambda: draw(factor)),
    }


def main() -> None:
    """Measure and store."""
    torch.set_num_threads(1)
    stored = {
        "torch": torch.__version__,
        "along size": [sparse(SIDE, rectangle) for rectangle in RECTANGLES],
        "along weights": [sparse(side, RECTANGLE) for side in SIDES],
        "dense": [dense(side) for side in DENSE],
    }
    OUT.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{OUT}\n")


if __name__ == "__main__":
    main()

"""What a step of BALI costs in width, batch and rows, beside the operation count of its Appendix D.

`python -m papers.bali.costs` measures CPU time with one thread, about two minutes, and writes papers/bali/costs.json;
`python -m papers pictures` draws it. A step's cost is the difference of a longer and a shorter run over the steps
between, the median of a few such pairs behind a run that only warms up, so that what is done once does not count.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito import BALI, Categorical, seeds
from dubito.jobs import alone
from dubito.models import mlp
from dubito.training import Training

from ..runner import provenance
from ..settings import explicit

FILE = Path(__file__).with_name("costs.json")
#: Where two of width, batch and rows stay while the third moves.
INPUTS, CLASSES, WIDTH, BATCH, ROWS = 64, 10, 256, 512, 4096
CURVES = {
    "width": (32, 64, 128, 256, 512, 1024),
    "batch": (64, 128, 256, 512, 1024, 2048, 4096),
    "rows": (1024, 4096, 16_384, 65_536),
}
#: Steps of the runs whose difference is measured, and how many pairs.
STEPS, PAIRS = (4, 16), 3


def operations(width: int, batch: int) -> float:
    """Appendix D, summed over the layers: (D_x² + D_x D_y + D_y²) B + D_x³ + D_y³ + D_x² D_y + D_x D_y²."""
    total = 0.0
    for inputs, outputs in ((INPUTS, width), (width, width), (width, CLASSES)):
        square = inputs**2 + inputs * outputs + outputs**2
        total += square * batch + inputs**3 + outputs**3 + inputs**2 * outputs + inputs * outputs**2
    return total


def step_seconds(width: int, batch: int, rows: int, pairs: int = PAIRS, steps: Sequence[int] = STEPS) -> float:
    """CPU-seconds of one step.

    Args:
        width: units of both hidden layers.
        batch: rows per step.
        rows: of the training data.
        pairs: of runs, whose median counts.
        steps: of the shorter and of the longer run.
    """
    stream = seeds.generator(0, "costs")
    data = torch.randn(rows, INPUTS, generator=stream), torch.randint(CLASSES, (rows,), generator=stream)
    found = []
    seconds(data, width, batch, steps[0])
    for _ in range(pairs):
        short, long = (seconds(data, width, batch, count) for count in steps)
        found.append((long - short) / (steps[1] - steps[0]))
    return sorted(found)[pairs // 2]


def seconds(data: tuple[Tensor, Tensor], width: int, batch: int, steps: int) -> float:
    """CPU-seconds of a whole run, with the paper's algorithm: every step factorises."""
    method = explicit(BALI, step_size=0.1, update_rate=0.1, prior_scale=10.0, effective_data=1000.0, initial_std=1.0)
    net = mlp(INPUTS, (width, width), num_classes=CLASSES, activation="leaky_tanh", seed=0)
    training = explicit(Training, iterations=steps, batch_size=batch)
    begin = time.process_time()
    provenance.fit(method, net, data, explicit(Categorical), training=training, seed=0, progress=False)
    return time.process_time() - begin


def measured(curves: dict[str, tuple[int, ...]] = CURVES) -> dict[str, list[dict[str, Any]]]:
    """All curves: CPU-milliseconds of a step and the count of Appendix D, in millions."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, values in curves.items():
        found[name] = []
        for value in values:
            place = {"width": WIDTH, "batch": BATCH, "rows": ROWS, name: value}
            place["rows"] = max(place["rows"], place["batch"])
            found[name].append(
                {
                    **place,
                    "milliseconds": round(1e3 * step_seconds(place["width"], place["batch"], place["rows"]), 3),
                    "millions": round(operations(place["width"], place["batch"]) / 1e6, 2),
                }
            )
    return found


def growth(points: Sequence[dict[str, Any]], key: str, value: str) -> float:
    """The exponent of `value` in `key` between the last two places, log₂ of the ratio where the place doubles."""
    (x0, y0), (x1, y1) = ((float(point[key]), float(point[value])) for point in points[-2:])
    return float((torch.tensor(y1 / y0).log() / torch.tensor(x1 / x0).log()).item())


def main() -> None:
    """Measure and write."""
    with alone():
        found = measured()
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, points in found.items():
        exponents = [growth(points, name, value) for value in ("milliseconds", "millions")]
        print(name, [point["milliseconds"] for point in points], "exponent {:.2f}, counted {:.2f}".format(*exponents))


if __name__ == "__main__":
    main()

"""All 75 corruptions of 1,000 colour images of 32 × 32 pixels: CPU seconds of one thread.

Medians over the rounds, all corruptions interleaved in every round.

    python benchmarks/shifts.py [rounds]
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch

from dubito.shifts import CORRUPTIONS, SEVERITIES, corrupt

#: CPU seconds that all of them together may take.
BAR = 60.0
RESULTS = Path(__file__).parent / "results" / "shifts.json"


def main(rounds: int = 5) -> None:
    torch.set_num_threads(1)
    images = torch.rand(1000, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {name: [] for name in CORRUPTIONS}
    for _ in range(rounds):
        for name in CORRUPTIONS:
            start = time.process_time()
            for severity in SEVERITIES:
                corrupt(images, name, severity)
            seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    total = sum(medians.values())
    for name, own in medians.items():
        print(f"{name:16s} {own:6.2f} s")
    print(f"{'all 75':16s} {total:6.2f} s, at most {BAR:g}: {'yes' if total <= BAR else 'NO'}")
    found = {
        "cpu_seconds": {k: round(v, 3) for k, v in medians.items()},
        "total": round(total, 2),
        "bar": BAR,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"images": [1000, 3, 32, 32], "rounds": rounds, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Two versions of the library side by side: fits and predictions, CPU time of one thread, interleaved.

    python benchmarks/versions.py /path/to/older/src [--rounds 15] [--only rank1] [--out results/versions.json]

Each version runs in a process of its own that waits while the other works. A bar is worse if the 95 % interval of its
paired ratio (this version over the older one) lies above 1.05. The public interface alone is used, so that any two
versions can be compared.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from scipy.stats import t

WORSE = 1.05
METHODS = (
    "map", "mc-dropout", "deep-ensemble", "swag", "mean-field", "k-tied", "batch-ensemble", "rank1", "implicit",
    "bali", "noisy-adam", "vogn", "noisy-kfac", "laplace-diag", "laplace-kfac", "laplace-efb", "laplace-inf",
)  # fmt: skip


def jobs() -> dict[str, Callable[[], Callable[[], object]]]:
    """By name: what prepares a job and returns the work that is timed."""
    import warnings

    import torch
    from torch import nn

    import dubito
    from dubito import Categorical, Training

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0))

    def lenet() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 10),
        )  # fmt: skip

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    def dense(*sizes: int) -> nn.Module:
        layers = [part for n, m in itertools.pairwise(sizes) for part in (nn.Linear(n, m), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    networks = {
        "small": (lambda: dense(20, 64, 64, 2), (20,), 32, 120),
        "mlp": (lambda: dense(784, 400, 400, 10), (784,), 128, 24),
        "lenet": (lenet, (1, 28, 28), 64, 16),
        "lstm": (Recurrent, (12, 16), 32, 24),
    }

    def fitted(method: str, network: str, steps: int):
        build, shape, batch, _ = networks[network]
        torch.manual_seed(0)
        net, x = build(), rows(4 * batch, *shape)
        y = torch.arange(4 * batch) % 2
        training = Training(iterations=steps, batch_size=batch, lr=1e-3)
        settings = dubito.methods()[method]
        if method == "bali":
            settings = dubito.BALI(effective_data=100.0)
        return lambda: settings.fit(net, (x, y), Categorical(), training=training, progress=False)

    table: dict[str, Callable[[], Callable[[], object]]] = {}
    for network, (_, shape, _, steps) in networks.items():
        for method in METHODS:
            if network == "lstm" and method in ("bali", "laplace-efb", "noisy-adam"):
                continue
            table[f"{method} fit {network}"] = lambda m=method, n=network, s=steps: fitted(m, n, s)
            for count in (1, 256) if network != "lstm" else (32,):

                def predicted(m=method, n=network, c=count, shape=shape):
                    posterior, x = fitted(m, n, 2)(), rows(c, *shape)
                    return lambda: posterior.predict(x, 16)

                table[f"{method} predict {network} {count}"] = predicted
        for structure in ("laplace-diag", "laplace-kfac", "laplace-inf"):

            def linearised(m=structure, n=network, shape=shape):
                posterior, x = fitted(m, n, 2)(), rows(32, *shape)
                return lambda: posterior.predict(x, linearised=True)

            table[f"{structure} linearised {network} 32"] = linearised
        for option, method in (("marginal", "mean-field"), ("per_example", "rank1")):

            def by_row(m=method, n=network, o=option, shape=shape):
                posterior, x = fitted(m, n, 2)(), rows(64, *shape)
                return lambda: posterior.predict(x, 16, **{o: True})

            table[f"{method} {option} {network} 64"] = by_row
    return table


def work() -> None:
    """Answer every line, a job's name, with the least CPU time of some runs; the first prepares it."""
    table, ready = jobs(), {}
    for line in sys.stdin:
        name = line.strip()
        if name not in ready:
            ready.clear()
            ready[name] = table[name]()
            ready[name]()  # warm up
        times: list[float] = []
        while sum(times) < 0.03:
            start = time.process_time()
            ready[name]()
            times.append(time.process_time() - start)
        print(json.dumps(min(times)), flush=True)  # what others do on the machine only adds


class Version:
    """One version's process."""

    def __init__(self, source: str) -> None:
        # Large blocks stay with the process: whether they are mapped anew depends on what was freed before.
        memory = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
        environment = {**os.environ, **memory, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--work"]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def time(self, name: str) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def compared(name: str, versions: list[Version], rounds: int) -> dict[str, float]:
    """Times of both versions in turn, and the mean of the paired log ratios with its 95 % interval."""
    logs, seconds = [], []
    for turn in range(rounds):
        order = versions if turn % 2 else versions[::-1]
        times = {id(version): version.time(name) for version in order}
        older, newer = (times[id(version)] for version in versions)
        logs.append(math.log(newer / older))
        seconds.append(newer)
    mean, width = statistics.mean(logs), t.ppf(0.975, rounds - 1) * statistics.stdev(logs) / rounds**0.5
    low, high = math.exp(mean - width), math.exp(mean + width)
    return {
        "ratio": round(math.exp(mean), 3),
        "low": round(low, 3),
        "high": round(high, 3),
        "ms": round(1e3 * statistics.median(seconds), 3),
        "worse": low > WORSE,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("older", nargs="?", help="the src folder of the older version")
    parser.add_argument("--work", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.work:
        return work()
    here = str(Path(__file__).parent.parent / "src")
    versions = [Version(options.older), Version(here)]
    results = {}
    for name in jobs():
        if all(word in name for word in options.only.split()):
            results[name] = compared(name, versions, options.rounds)
            print(f"{name:42}", results[name], flush=True)
    worse = [name for name, result in results.items() if result["worse"]]
    print(f"{len(results)} bars, {len(worse)} worse: {worse}")
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()

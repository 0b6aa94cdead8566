"""BALI's cost: a step against Adam's, and many fits side by side against one by one.

CPU time, one thread, cases interleaved in every round, medians over rounds. A busy machine adds to absolute times,
because its caches are shared; ratios of one run suffer less.

    python benchmarks/bali.py [rounds]
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import BALI, Categorical, Gaussian, Training
from dubito.allocator import keep_large_blocks
from dubito.fitting import prepare
from dubito.inference.bali.setup import find_layers
from dubito.inputs import Batch
from dubito.optim import VOGN, NoisyAdam, NoisyKFAC, NoisyOptimizer, Vadam
from dubito.training import Processes
from dubito.training.plan import plan_run

RESULTS = Path(__file__).parent / "results" / "bali.json"
ROWS, STEPS = 2048, 4
#: A step in steps of Adam; CPU-seconds per 1,000 iterations and split; one by one over side by side.
BARS = {"BALI": 3.0, "yacht": 0.5, "power": 1.5, "yacht, one by one": 3.0}


def classifier(inputs: int = 784) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)
    )


def images(inputs: int = 784) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, inputs, generator=generator), torch.randint(10, (ROWS,), generator=generator)


def adam(inputs: int = 784) -> Callable[[], None]:
    net, (x, y) = classifier(inputs), images(inputs)
    optimizer = torch.optim.Adam(net.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def natural(kind: type[NoisyOptimizer]) -> Callable[[], None]:
    net, (x, y) = classifier(), images()
    optimizer = kind(net.parameters(), num_data=ROWS)  # pyright: ignore[reportCallIssue]

    def step() -> None:
        optimizer.zero_grad()
        with optimizer.sampled():
            F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def bali(inputs: int = 784) -> Callable[[], None]:
    method = BALI(effective_data=1200.0, output_floor=1e-4, prior_scale=10.0)
    data = images(inputs)
    training = Training(iterations=10**6, batch_size=ROWS)
    prepared = prepare(classifier(inputs), data, Categorical(), progress=False)
    found = find_layers(prepared.network, prepared.example.inputs, None)
    objective = method.objective(prepared, found, prepared.source, 0)
    stepper = objective.stepper(training, plan_run(training, ROWS, 1, ROWS), Processes(), 0)
    batch, count = Batch(*data), 0

    def step() -> None:
        nonlocal count
        stepper.step(count, [batch], ROWS, False)
        count += 1

    return step


def table(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x, x[:, :1].sin() + 0.1 * torch.randn(rows, 1, generator=generator)


def throughput(rows: int, columns: int, splits: int, side_by_side: bool) -> Callable[[int], float]:
    """CPU-seconds per 1,000 iterations and split, the setting up taken off."""
    net = nn.Sequential(nn.Linear(columns, 50), nn.ReLU(), nn.Linear(50, 1))
    tables = [table(rows, columns, seed) for seed in range(splits)]
    method = BALI(effective_data=min(rows, 2000), output_floor=1e-4, initial_std=1.0)

    def spent(iterations: int) -> float:
        training = Training(iterations=iterations, batch_size=min(rows, 1024))
        start = time.process_time()
        if side_by_side:
            method.fit_many(net, tables, Gaussian(), training=training, progress=False)
        else:
            method.fit(net, tables[0], Gaussian(), training=training, progress=False)
        return time.process_time() - start

    def per_thousand(iterations: int) -> float:
        return 1000 * (spent(iterations + 20) - spent(20)) / iterations / (splits if side_by_side else 1)

    return per_thousand


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    keep_large_blocks()
    steps = {"Adam": adam(), "BALI": bali(), "Adam, 57 inputs": adam(57), "BALI, 57 inputs": bali(57)}
    steps |= {kind.__name__: natural(kind) for kind in (NoisyAdam, Vadam, VOGN, NoisyKFAC)}
    for step in steps.values():
        step()
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        spent = {}
        for name, step in steps.items():
            start = time.process_time()
            for _ in range(STEPS):
                step()
            spent[name] = time.process_time() - start
        for name in steps:
            plain = "Adam, 57 inputs" if "57" in name else "Adam"
            ratios[name].append(spent[name] / spent[plain])
    results = {f"step of {name}, in steps of Adam": statistics.median(each) for name, each in ratios.items()}
    runs = {
        "yacht, 20 splits": (throughput(277, 6, 20, True), 150),
        "power, 10 splits": (throughput(8611, 4, 10, True), 60),
        "yacht, one by one": (throughput(277, 6, 1, False), 300),
    }
    for run, _ in runs.values():
        run(2)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (run, iterations) in runs.items():
            seconds[name].append(run(iterations))
    for name, each in seconds.items():
        results[f"{name}: CPU-seconds per 1,000 iterations and split"] = statistics.median(each)
    each = zip(seconds["yacht, one by one"], seconds["yacht, 20 splits"], strict=True)
    results["yacht: one by one over side by side"] = statistics.median(alone / many for alone, many in each)
    for name, value in results.items():
        print(f"{name:<60} {value:7.2f}")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(
        json.dumps({"rounds": rounds, "rows": ROWS, "bars": BARS, "results": results}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()

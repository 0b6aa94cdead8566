"""BALI's cost: a step against Adam's, and many fits side by side against one by one."""

import time
from collections.abc import Callable

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
from papers.bali.uci.replicas import fit_many

from .bars import Bar, Values, benchmark, interleaved, ratios

ROWS = 2048


def classifier(inputs: int = 784) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))


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
            fit_many(method, net, tables, Gaussian(), training=training, seed=0, seeds_of_fits=range(splits))
        else:
            method.fit(net, tables[0], Gaussian(), training=training, progress=False)
        return time.process_time() - start

    def per_thousand(iterations: int) -> float:
        return 1000 * (spent(iterations + 20) - spent(20)) / iterations / (splits if side_by_side else 1)

    return per_thousand


@benchmark({"BALI, 784 inputs": Bar(3.0, "steps of Adam"), "BALI, 57 inputs": Bar(3.0, "steps of Adam")})
def bali_steps(rounds: int) -> Values:
    keep_large_blocks()
    works = {"Adam, 784 inputs": adam(), "BALI, 784 inputs": bali()}
    works |= {"Adam, 57 inputs": adam(57), "BALI, 57 inputs": bali(57)}
    works |= {f"{kind.__name__}, 784 inputs": natural(kind) for kind in (NoisyAdam, Vadam, VOGN, NoisyKFAC)}
    seconds = interleaved(works, rounds)
    named = [name for name in works if not name.startswith("Adam")]
    return {name: ratios(seconds, name, f"Adam, {name.split(', ')[1]}") for name in named}


@benchmark(
    {
        "yacht, 20 splits": Bar(0.5, "CPU-seconds per 1,000 iterations and split"),
        "power, 10 splits": Bar(1.5, "CPU-seconds per 1,000 iterations and split"),
        "yacht, side by side over one by one": Bar(1 / 3, "of the same"),
    }
)
def bali_splits(rounds: int) -> Values:
    keep_large_blocks()
    runs = {
        "yacht, 20 splits": (throughput(277, 6, 20, True), 150),
        "power, 10 splits": (throughput(8611, 4, 10, True), 60),
        "yacht, one by one": (throughput(277, 6, 1, False), 300),
    }
    for run, _ in runs.values():
        run(2)
    values: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (run, iterations) in runs.items():
            values[name].append(run(iterations))
    side_by_side = ratios(values, "yacht, 20 splits", "yacht, one by one")
    return {**values, "yacht, side by side over one by one": side_by_side}

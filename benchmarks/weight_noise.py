"""Training steps and predictions of mean field and 2-tied posteriors against the plain network.

CPU time, one thread, all cases interleaved in every round, medians of the ratios to the plain network's time in
the same round. Memory is kept between steps (`dubito.allocator`) for all of them. Differences under 10 % mean
nothing; a busy machine adds to them, because its caches are shared.

    python benchmarks/weight_noise.py [rounds] [case ...]
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import Categorical, Flipout, KTied, LocalReparameterised, MeanField, Reparameterised
from dubito.allocator import keep_large_blocks
from dubito.inputs import Batch
from dubito.method import TrainedMethod
from dubito.models import lenet, mlp

ESTIMATORS = {"reparameterised": Reparameterised(), "local": LocalReparameterised(), "flipout": Flipout()}
METHODS: dict[str, Callable[..., TrainedMethod]] = {"mean field": MeanField, "2-tied": KTied}

#: The most a case may cost, in plain steps, or in plain passes over the inputs for predictions of 16 samples.
BARS = {
    "mlp": {
        "2-tied local": 1.45,
        "mean field reparameterised": 1.25,
        "mean field flipout": 2.4,
        "mean field local": 2.3,
    },
    "lenet": {"2-tied local": 1.95, "mean field reparameterised": 1.28, "mean field flipout": 1.86},
    "predict": {
        "mean field functions": 19.0,
        "2-tied functions": 18.5,
        "2-tied marginal": 16.5,
        "mean field marginal": 19.5,
    },
}
#: Networks and batches in which a 2-tied step must not be slower than mean field's with the same estimator.
STEPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (lambda: mlp(784), (1024, 784), 10),
    "lenet": (
        lambda: lenet(num_classes=100, in_channels=3, image_size=32, kernel_size=3),
        (128, 3, 32, 32),
        100,
    ),
    "small mlp": (lambda: mlp(784, (100, 100)), (128, 784), 10),
    "wide mlp": (lambda: mlp(784, (1200, 1200)), (128, 784), 10),
}


def step(parameters: list, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=True)

    def work() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    return work


def method_step(method: TrainedMethod, net: nn.Module, batch: Batch) -> Callable[[], None]:
    built = method.build(net, Categorical(), 50_000)
    built.bind(batch.inputs)
    built.draft.network.train()
    generator = torch.Generator().manual_seed(0)
    groups = built.parameter_groups(1e-4)
    return step(groups, lambda: built.batch_loss(batch, 1.0, generator).total)


def steps(name: str) -> dict[str, Callable[[], None]]:
    make, shape, classes = STEPS[name]
    net, generator = make(), torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator)
    y = torch.randint(classes, (len(x),), generator=generator)
    plain = make()
    cases = {"plain": step(list(plain.parameters()), lambda: F.cross_entropy(plain(x), y))}
    for label, method in METHODS.items():
        for key, estimator in ESTIMATORS.items():
            cases[f"{label} {key}"] = method_step(method(estimator=estimator), net, Batch(x, y))
    return cases


def predictions() -> dict[str, Callable[[], object]]:
    net = mlp(784).eval().requires_grad_(False)
    x = torch.randn(1000, 784, generator=torch.Generator().manual_seed(1))
    cases: dict[str, Callable[[], object]] = {"plain": lambda: net(x)}
    for label, method in METHODS.items():
        posterior = method().build(mlp(784), Categorical(), 50_000).posterior()
        cases[f"{label} functions"] = lambda posterior=posterior: posterior.predict(x, 16)
        cases[f"{label} marginal"] = lambda posterior=posterior: posterior.predict(x, 16, marginal=True)
    return cases


def seconds(work: Callable[[], object], times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - start) / times


def measure(cases: dict[str, Callable[[], object]], rounds: int, times: int) -> dict[str, list[float]]:
    """CPU seconds of every case in every round."""
    for work in cases.values():
        work()
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, work in cases.items():
            found[name].append(seconds(work, times))
    return found


def ratio(found: dict[str, list[float]], name: str, to: str = "plain") -> float:
    return statistics.median(a / b for a, b in zip(found[name], found[to], strict=True))


def main() -> None:
    torch.set_num_threads(1)
    keep_large_blocks()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    for case in sys.argv[2:] or [*STEPS, "predict"]:
        cases = predictions() if case == "predict" else steps(case)
        found = measure(cases, rounds, 3 if case != "predict" else 1)
        bars = BARS.get(case, {})
        plain = 1e3 * statistics.median(found["plain"])
        print(json.dumps({"case": case, "plain_ms": round(plain, 2), "rounds": rounds}))
        for name in cases:
            line: dict[str, object] = {"case": name, "ratio": round(ratio(found, name), 3)}
            if name in bars:
                line["bar"] = bars[name]
            if name.startswith("2-tied") and case != "predict":
                line["to_mean_field"] = round(ratio(found, name, name.replace("2-tied", "mean field")), 3)
            print(json.dumps(line))


if __name__ == "__main__":
    main()

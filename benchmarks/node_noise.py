"""Training steps, predictions and memory of methods with doubt on the nodes, against the plain network.

CPU time, one thread, all cases interleaved in every round, medians of the ratios to the plain network's time in
the same round. Memory is kept between steps (`dubito.allocator`) for all of them. Differences under 10 % mean
nothing; a busy machine adds to them, because its caches are shared. Where torch-uncertainty is on the path its
BatchEnsemble layers run beside ours, without the rest of that package.

    python benchmarks/node_noise.py [rounds] [case ...]
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dubito
from dubito import BatchEnsemble, Categorical, Implicit, Rank1, factors
from dubito.allocator import keep_large_blocks
from dubito.inputs import Batch
from dubito.method import TrainedMethod
from dubito.models import lenet, mlp
from dubito.models.residual import PreActivationResNet, PreBlock

RESULTS = Path(__file__).parent / "results" / "node_noise.json"
K = 4
METHODS: dict[str, TrainedMethod] = {
    "rank-1": Rank1(components=K),
    "rank-1 Cauchy": Rank1(components=K, family=factors.Cauchy()),
    "BatchEnsemble": BatchEnsemble(components=K),
    "implicit": Implicit(components=K),
}
#: The most a case may cost, in plain steps, or in plain passes over the inputs for predictions of 16 samples.
BARS: dict[str, dict[str, float]] = {
    "mlp": {"rank-1": 6.0, "BatchEnsemble": 5.0, "implicit": 1.5},
    "lenet": {"rank-1": 5.0, "BatchEnsemble": 5.0, "implicit": 1.2},
    "resnet": {"rank-1": 5.0, "BatchEnsemble": 4.8, "implicit": 1.15},
    "predict": {"rank-1": 17.5, "implicit": 17.0},
    "parameters": {"rank-1": 1.05, "implicit": 1.03},
    "memory": {"rank-1": 1.25},
}
Make = Callable[[], nn.Module]


def small_resnet() -> nn.Module:
    return PreActivationResNet(PreBlock, (32, 64, 128), (1, 1, 1), num_classes=10, in_channels=3, base=16)


STEPS: dict[str, tuple[Make, tuple[int, ...], int]] = {
    "mlp": (lambda: mlp(784), (1024, 784), 10),
    "lenet": (
        lambda: lenet(num_classes=100, in_channels=3, image_size=32, kernel_size=3),
        (128, 3, 32, 32),
        100,
    ),
    "resnet": (small_resnet, (64, 3, 32, 32), 10),
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
    return step(built.parameter_groups(1e-4), lambda: built.batch_loss(batch, 1.0, generator).total)


def data(name: str) -> Batch:
    _, shape, classes = STEPS[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator)
    return Batch(x, torch.randint(classes, (len(x),), generator=generator))


def steps(name: str) -> dict[str, Callable[[], object]]:
    make, batch = STEPS[name][0], data(name)
    plain = make()
    cases: dict[str, Callable[[], object]] = {
        "plain": step(list(plain.parameters()), lambda: F.cross_entropy(plain(batch.inputs), batch.targets))
    }
    for label, method in METHODS.items():
        cases[label] = method_step(method, make(), batch)
    layers = peer_layers()
    if layers is not None:
        peer = as_peer(make(), layers)
        targets = batch.targets.repeat(K)
        cases["torch-uncertainty BatchEnsemble"] = step(
            list(peer.parameters()),
            lambda: F.cross_entropy(peer(batch.inputs.repeat(K, *[1] * (batch.inputs.ndim - 1))), targets),
        )
    return cases


def peer_layers() -> ModuleType | None:
    """The module of torch-uncertainty with its BatchEnsemble layers, if it is on the path."""
    package = importlib.util.find_spec("torch_uncertainty")
    if package is None or package.submodule_search_locations is None:
        return None
    path = Path(package.submodule_search_locations[0]) / "layers" / "batch_ensemble.py"
    spec = importlib.util.spec_from_file_location("peer_batch_ensemble", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_peer(net: nn.Module, layers: ModuleType) -> nn.Module:
    """The network with the peer's layers in place of dense layers and convolutions."""
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, layers.BatchLinear.from_linear(child, K))
            elif isinstance(child, nn.Conv2d):
                setattr(parent, name, layers.BatchConv2d.from_conv2d(child, K))
    return net


def predictions() -> dict[str, Callable[[], object]]:
    net = mlp(784).eval().requires_grad_(False)
    x = data("mlp").inputs[:1000]
    cases: dict[str, Callable[[], object]] = {"plain": lambda: net(x)}
    for label, method in METHODS.items():
        if label != "BatchEnsemble":  # four draws are all it has
            posterior = fitted(method)
            cases[label] = lambda posterior=posterior: posterior.predict(x, 16)
    return cases


def fitted(method: TrainedMethod) -> dubito.posterior.Posterior:
    built, batch = method.build(mlp(784), Categorical(), 50_000), data("mlp")
    built.bind(batch.inputs)
    return built.posterior()


def parameters() -> dict[str, float]:
    """Numbers that define the distribution, over those of the network."""
    plain = sum(p.numel() for p in mlp(784).parameters())
    return {label: fitted(method).num_parameters / plain for label, method in METHODS.items()}


def memory_of(case: str) -> float:
    """Peak memory in bytes that three steps take beyond what is there before them, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory", case], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def peak(case: str) -> None:
    """Print the bytes that three steps of a case take, networks and optimisers included."""
    torch.set_num_threads(1)
    batch = data("mlp")
    small = Batch(batch.inputs[:8], batch.targets[:8])
    method_step(METHODS["rank-1"], mlp(784, (8, 8)), small)()  # what code takes is not counted
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far is that of now
    before = memory("VmRSS")
    if case == "ensemble":
        nets = [mlp(784) for _ in range(K)]
        works = [
            step(list(net.parameters()), lambda net=net: F.cross_entropy(net(batch.inputs), batch.targets))
            for net in nets
        ]
    else:
        works = [method_step(METHODS[case], mlp(784), batch)]
    for _ in range(3):
        for work in works:
            work()
    print(memory("VmHWM") - before)


def memory(field: str) -> int:
    """Bytes of a field of this process's status; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


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


def ratios(case: str, rounds: int) -> dict[str, float]:
    if case == "parameters":
        return parameters()
    if case == "memory":
        base = memory_of("ensemble")
        return {label: memory_of(label) / base for label in METHODS}
    found = measure(
        predictions() if case == "predict" else steps(case), rounds, 1 if case == "predict" else 2
    )
    return {
        name: statistics.median(a / b for a, b in zip(times, found["plain"], strict=True))
        for name, times in found.items()
        if name != "plain"
    }


def main() -> None:
    if sys.argv[1:2] == ["--memory"]:
        peak(sys.argv[2])
        return
    torch.set_num_threads(1)
    keep_large_blocks()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for case in sys.argv[2:] or [*STEPS, "predict", "parameters", "memory"]:
        lines = []
        for name, ratio in ratios(case, rounds).items():
            line: dict[str, object] = {"case": case, "method": name, "ratio": round(ratio, 3)}
            if name in BARS.get(case, {}):
                line["bar"] = BARS[case][name]
            print(json.dumps(line))
            lines.append(line)
        results[case] = {"torch": torch.__version__, "rounds": rounds, "lines": lines}
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

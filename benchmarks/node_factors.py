"""Training steps, predictions and memory of methods with uncertainty on the nodes, over the plain network's.

Memory is kept between steps (`dubito.allocator`) for all of them. Where torch-uncertainty is installed its
BatchEnsemble layers run beside ours, without the rest of that package.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
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

from .bars import ROOT, Bar, Values, benchmark, interleaved, peak_mebibytes, ratios

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
    "lenet": (lambda: lenet(num_classes=100, in_channels=3, image_size=32, kernel_size=3), (128, 3, 32, 32), 100),
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
    """Peak memory that three steps take, networks and optimisers included, in a process of its own."""
    code = f"from benchmarks.node_factors import peak; print(peak({case!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def peak(case: str) -> float:
    """The same in this process."""
    torch.set_num_threads(1)
    batch = data("mlp")
    small = Batch(batch.inputs[:8], batch.targets[:8])
    method_step(METHODS["rank-1"], mlp(784, (8, 8)), small)()  # what code takes is not counted

    def three_steps() -> None:
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

    return peak_mebibytes(three_steps)


def measured(case: str, rounds: int) -> Values:
    """Every method over the plain network, or over an ensemble's memory."""
    if case == "parameters":
        return {label: [value] for label, value in parameters().items()}
    if case == "memory":
        peaks = [{label: memory_of(label) for label in ("ensemble", *METHODS)} for _ in range(rounds)]
        return {label: [peak[label] / peak["ensemble"] for peak in peaks] for label in METHODS}
    keep_large_blocks()
    seconds = interleaved(predictions() if case == "predict" else steps(case), rounds)
    return {name: ratios(seconds, name, "plain") for name in seconds if name != "plain"}


UNITS = {"predict": "passes for 16 draws", "parameters": "of the network's", "memory": "of an ensemble's"}
for case, limits in BARS.items():
    bars = {name: Bar(limit, UNITS.get(case, "plain steps")) for name, limit in limits.items()}
    benchmark(bars, f"node_factors_{case}")(partial(measured, case))

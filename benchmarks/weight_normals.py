"""Training steps and predictions of mean field and 2-tied posteriors, in steps and passes of the plain network.

Memory is kept between steps (`dubito.allocator`) for all of them. Where bayesian-torch and blitz are installed they
run in the same rounds, KL term included.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import Categorical, Flipout, KTied, LocalReparameterised, MeanField, Reparameterised
from dubito.allocator import keep_large_blocks
from dubito.inputs import Batch
from dubito.method import TrainedMethod
from dubito.models import lenet, mlp

from .bars import Bar, Values, Work, benchmark, importable, interleaved, ratios

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
    "lenet": (lambda: lenet(num_classes=100, in_channels=3, image_size=32, kernel_size=3), (128, 3, 32, 32), 100),
    "table 4": (lambda: mlp(784, (128,)), (32, 784), 10),
    "small mlp": (lambda: mlp(784, (100, 100)), (128, 784), 10),
    "wide mlp": (lambda: mlp(784, (1200, 1200)), (128, 784), 10),
}


def step(parameters: list, loss: Callable[[], Tensor]) -> Work:
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=True)

    def work() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    return work


def method_step(method: TrainedMethod, net: nn.Module, batch: Batch) -> Work:
    built = method.build(net, Categorical(), 50_000)
    built.bind(batch.inputs)
    built.draft.network.train()
    generator = torch.Generator().manual_seed(0)
    groups = built.parameter_groups(1e-4)
    return step(groups, lambda: built.batch_loss(batch, 1.0, generator).total)


def steps(name: str) -> dict[str, Work]:
    make, shape, classes = STEPS[name]
    net, generator = make(), torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator)
    y = torch.randint(classes, (len(x),), generator=generator)
    plain = make()
    cases = {"plain": step(list(plain.parameters()), lambda: F.cross_entropy(plain(x), y))}
    for label, method in METHODS.items():
        for key, estimator in ESTIMATORS.items():
            cases[f"{label} {key}"] = method_step(method(estimator=estimator), net, Batch(x, y))
    for label, (peer, divergence) in peers(make).items():
        cases[label] = step(
            list(peer.parameters()), lambda peer=peer, kl=divergence: F.cross_entropy(peer(x), y) + kl(peer) / 50_000
        )
    return cases


def predictions() -> dict[str, Work]:
    net = mlp(784).eval().requires_grad_(False)
    x = torch.randn(1000, 784, generator=torch.Generator().manual_seed(1))
    cases: dict[str, Work] = {"plain": lambda: net(x)}
    for label, method in METHODS.items():
        posterior = method().build(mlp(784), Categorical(), 50_000).posterior()
        cases[f"{label} functions"] = lambda posterior=posterior: posterior.predict(x, 16)
        cases[f"{label} marginal"] = lambda posterior=posterior: posterior.predict(x, 16, marginal=True)
    for label, (peer, _) in peers(lambda: mlp(784)).items():
        peer.eval().requires_grad_(False)
        cases[label] = lambda peer=peer: torch.stack([peer(x).softmax(-1) for _ in range(16)]).mean(0)
    return cases


def peers(make: Callable[[], nn.Module]) -> dict[str, tuple[nn.Module, Callable[[nn.Module], Tensor]]]:
    """The network in other libraries' layers, and its divergence there, as far as they are installed."""
    found: dict[str, tuple[nn.Module, Callable[[nn.Module], Tensor]]] = {}
    if importable("bayesian_torch"):
        from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

        for kind in ("Reparameterization", "Flipout"):
            settings = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "type": kind}
            settings |= {"posterior_rho_init": -4.0, "moped_enable": False}
            net = make()
            dnn_to_bnn(net, settings)
            found[f"bayesian-torch {kind}"] = net, get_kl_loss
    if importable("blitz"):
        from blitz.modules import BayesianConv2d, BayesianLinear

        net = make()
        for name, layer in list(net.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(net, name, BayesianLinear(layer.in_features, layer.out_features))
            elif isinstance(layer, nn.Conv2d):
                sizes = (layer.in_channels, layer.out_channels, layer.kernel_size)
                setattr(net, name, BayesianConv2d(*sizes, padding=layer.padding))
        found["blitz"] = net, blitz_divergence
    return found


def blitz_divergence(net: nn.Module) -> Tensor:
    """One draw's estimate, which its layers keep of their last pass."""
    layers = [layer for layer in net.children() if hasattr(layer, "log_variational_posterior")]
    return torch.stack([layer.log_variational_posterior - layer.log_prior for layer in layers]).sum()  # pyright: ignore


def bars(case: str, unit: str) -> dict[str, Bar]:
    return {name: Bar(limit, unit) for name, limit in BARS.get(case, {}).items()}


def measured(case: str, rounds: int) -> Values:
    """Every case of a network over the plain one."""
    keep_large_blocks()
    seconds = interleaved(predictions() if case == "predict" else steps(case), rounds, warm=4)
    values = {name: ratios(seconds, name, "plain") for name in seconds if name != "plain"}
    if case != "predict":
        for key in ESTIMATORS:
            values[f"2-tied {key} to mean field's"] = ratios(seconds, f"2-tied {key}", f"mean field {key}")
    return values


for network in STEPS:
    label = f"weight_normals_{network.replace(' ', '_')}"
    limits = bars(network, "plain steps") | {
        f"2-tied {key} to mean field's": Bar(1.0, "mean field steps") for key in ESTIMATORS
    }
    benchmark(limits, label)(partial(measured, network))
benchmark(bars("predict", "passes for 16 draws"), "weight_normals_predictions")(partial(measured, "predict"))

"""Fresh draws at one row: what a server pays for 32 of them, in passes of the bare network and beside peers."""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from dubito import BALI, EFB, KFAC, SWAG, Categorical, DeepEnsemble, KTied, Laplace, MeanField, Training
from dubito.models import mlp
from dubito.posterior import Posterior

from .bars import Bar, Values, Work, benchmark, importable, interleaved, ratios

DRAWS = 32
#: Inputs and hidden units.
NETWORKS = {"small": (64, (128, 128)), "MLP": (784, (400, 400))}
METHODS = {
    "mean field": MeanField(),
    "2-tied": KTied(),
    "SWAG": SWAG(),
    "deep ensemble": DeepEnsemble(members=4),
    "BALI": BALI(effective_data=256.0),
}
STRUCTURES = {"KFAC": KFAC(), "EFB": EFB()}
#: What is compared with which library, case by case.
PEERS = {"mean field": "bayesian_torch", "KFAC": "laplace", "KFAC linearised": "laplace"}


def rows(inputs: int, count: int = 256) -> tuple[Tensor, Tensor]:
    """Rows of ten classes."""
    stream = torch.Generator().manual_seed(0)
    y = torch.randint(10, (count,), generator=stream)
    centres = torch.randn(10, inputs, generator=stream)
    return centres[y] + torch.randn(count, inputs, generator=stream), y


def cases(network: nn.Module, inputs: int) -> dict[str, Work]:
    """Our predictions of one row by posteriors around a network."""
    data, row = rows(inputs), rows(inputs)[0][:1]
    short = Training(epochs=2, batch_size=64)
    fitted: dict[str, Posterior] = {
        name: method.fit(network, data, Categorical(), training=short) for name, method in METHODS.items()
    }
    for name, structure in STRUCTURES.items():
        fitted[name] = Laplace(structure=structure).fit(network, data, Categorical())
    works: dict[str, Work] = {
        name: partial(posterior.predict, row, DRAWS, **({"linearised": False} if name in STRUCTURES else {}))
        for name, posterior in fitted.items()
    }
    works["KFAC linearised"] = partial(fitted["KFAC"].predict, row, linearised=True)
    works["bare"] = torch.no_grad()(partial(network, row))
    return works


def reparameterised(inputs: int, hidden: tuple[int, ...]) -> Work:
    """The mean over forward passes of bayesian-torch's layers."""
    from bayesian_torch.layers import LinearReparameterization  # pyright: ignore[reportMissingImports]

    sizes, row = (inputs, *hidden, 10), rows(inputs)[0][:1]
    layers = [LinearReparameterization(n, m) for n, m in pairwise(sizes)]

    @torch.no_grad()
    def work() -> Tensor:
        total = torch.zeros(1, 10)
        for _ in range(DRAWS):
            x = row
            for number, layer in enumerate(layers):
                x = layer(x.relu() if number else x, return_kl=False)
            total += x.softmax(-1)
        return total / DRAWS

    return work


def laplace_torch(network: nn.Module, inputs: int) -> dict[str, Work]:
    """Its KFAC by draws and in closed form."""
    from laplace import Laplace as Peer  # pyright: ignore[reportMissingImports]
    from torch.utils.data import DataLoader, TensorDataset

    posterior = Peer(network, "classification", subset_of_weights="all", hessian_structure="kron")
    posterior.fit(DataLoader(TensorDataset(*rows(inputs)), batch_size=64))
    row = rows(inputs)[0][:1]
    return {
        "KFAC": partial(posterior, row, pred_type="nn", link_approx="mc", n_samples=DRAWS),
        "KFAC linearised": partial(posterior, row, pred_type="glm", link_approx="probit"),
    }


def peers(network: nn.Module, inputs: int, hidden: tuple[int, ...]) -> dict[str, Work]:
    """Those that are installed."""
    works = {"mean field": reparameterised(inputs, hidden)} if importable("bayesian_torch") else {}
    if importable("laplace"):
        works |= laplace_torch(network, inputs)
    return works


#: At most so many passes of the bare network.
BARE = {("MLP", "KFAC"): 900.0, ("MLP", "BALI"): 900.0}


@benchmark(
    {
        f"{case}, {network}": Bar(BARE.get((network, case)), "bare passes")
        for network in NETWORKS
        for case in (*METHODS, *STRUCTURES, "KFAC linearised")
    }
    | {f"{case} / {peer}, {network}": Bar(1.0, "") for network in NETWORKS for case, peer in PEERS.items()}
)
def predict(rounds: int) -> Values:
    values: dict[str, list[float]] = {}
    for name, (inputs, hidden) in NETWORKS.items():
        network = mlp(inputs, hidden).eval()
        ours, others = cases(network, inputs), peers(network, inputs, hidden)
        named = {f"peer {case}": work for case, work in others.items()}
        seconds = interleaved({**ours, **named}, rounds)
        values |= {f"{case}, {name}": ratios(seconds, case, "bare") for case in ours if case != "bare"}
        for case in others:
            values[f"{case} / {PEERS[case]}, {name}"] = ratios(seconds, case, f"peer {case}")
    return values

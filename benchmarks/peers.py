"""Outputs of other libraries on a tiny problem, stored: `make bench-env`, or with any Python that has them.

docs/coming-from.md translates their calls into ours, and tests/docs/test_coming_from.py compares ours with what is
stored here, in benchmarks/results/peers.json: their versions, the problem, and what they answered. Nothing of dubito is
imported.
"""

import importlib.metadata
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

OUT = Path(__file__).parent / "results" / "peers.json"


def problem() -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    """A trained network 2-8-1, 40 rows, and five places to predict at, in float64."""
    torch.manual_seed(0)
    x = torch.randn(40, 2, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(40, 1, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(500):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    places = torch.tensor([[0.0, 0.0], [1.0, 0.5], [2.0, 2.0], [4.0, 4.0], [-8.0, 8.0]], dtype=torch.float64)
    return net, x, y, places


def laplace_torch(net: nn.Module, x: Tensor, y: Tensor, places: Tensor) -> dict:
    """Linearised means and variances, and log marginal likelihoods, noise 0.1 and prior precision 2."""
    from laplace import Laplace  # pyright: ignore[reportMissingImports]

    answers = {}
    for structure in ("diag", "kron"):
        la = Laplace(
            net,
            "regression",
            subset_of_weights="all",
            hessian_structure=structure,
            sigma_noise=0.1,
            prior_precision=2.0,
        )
        la.fit(DataLoader(TensorDataset(x, y), batch_size=40))
        mean, variance = la(places)
        answers[structure] = {
            "mean": mean.flatten().tolist(),
            "variance": variance.flatten().tolist(),
            "log_marginal_likelihood": la.log_marginal_likelihood().item(),
        }
    return answers


def bayesian_torch(net: nn.Sequential, x: Tensor, y: Tensor, places: Tensor) -> dict:
    """The divergence as it is reported (a mean over each tensor's elements), and moments over 4,000 passes."""
    import copy

    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss  # pyright: ignore[reportMissingImports]

    std = 0.05
    converted = copy.deepcopy(net).float()
    dnn_to_bnn(
        converted,
        {
            "prior_mu": 0.0,
            "prior_sigma": 1.0,
            "posterior_mu_init": 0.0,
            "posterior_rho_init": float(torch.tensor(std).expm1().log()),
            "type": "Reparameterization",
            "moped_enable": False,
        },
    )
    with torch.no_grad():
        for layer, plain in zip((converted[0], converted[2]), (net[0], net[2]), strict=True):
            for ours, theirs in (("weight", "mu_weight"), ("bias", "mu_bias")):
                getattr(layer, theirs).copy_(getattr(plain, ours))
            for rho in (layer.rho_weight, layer.rho_bias):
                rho.fill_(float(torch.tensor(std).expm1().log()))
        torch.manual_seed(0)
        outputs = torch.stack([converted(places.float()) for _ in range(4000)])
        return {
            "std": std,
            "kl": float(get_kl_loss(converted)),
            "mean": outputs.mean(0).flatten().tolist(),
            "output_std": outputs.std(0).flatten().tolist(),
        }


def main() -> None:
    """Ask each library that can be imported; the others are named with their errors."""
    net, x, y, places = problem()
    stored: dict = {
        "problem": {
            "x": x.tolist(),
            "y": y.tolist(),
            "places": places.tolist(),
            "weights": {name: tensor.tolist() for name, tensor in net.state_dict().items()},
        },
        "versions": {"torch": torch.__version__},
        "not run": {},
    }
    for name, ask in (("laplace-torch", laplace_torch), ("bayesian-torch", bayesian_torch)):
        stored[name] = ask(net, x, y, places)
        stored["versions"][name] = importlib.metadata.version(name)
    try:
        import torch_uncertainty  # noqa: F401  # pyright: ignore[reportMissingImports]
    except Exception as error:
        stored["not run"]["torch-uncertainty"] = f"{type(error).__name__}: {error}"
    OUT.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{OUT}: {stored['versions']}, not run: {stored['not run']}\n")


if __name__ == "__main__":
    main()

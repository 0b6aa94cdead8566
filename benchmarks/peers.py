"""Outputs of other libraries on a tiny problem, stored: `make bench-env`, or with any Python that has them.

docs/coming-from.md translates their calls into ours, and tests/docs/test_coming_from.py compares ours with what is
stored here, in benchmarks/results/peers.json: their versions, the problem, and what they answered. Nothing of dubito is
imported.
"""

import copy
import importlib.metadata
import importlib.util
import json
import sys
import types
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


def classes(net: nn.Sequential, y: Tensor) -> tuple[nn.Sequential, Tensor]:
    """A classifier that is too sure, of the same network, and labels."""
    last = nn.Linear(1, 2, bias=False).double()
    last.weight.data = torch.tensor([[-8.0], [8.0]], dtype=torch.float64)
    return nn.Sequential(net, last), (y[:, 0] > 0.5).long()


def torch_uncertainty(net: nn.Sequential, x: Tensor, y: Tensor, places: Tensor) -> dict:
    """Its divergence, a mean over layers of one draw each, over 4,000 passes; moments; a temperature."""
    spec = importlib.util.find_spec("torch_uncertainty")
    assert spec is not None and spec.origin is not None
    for name in (
        "torch_uncertainty",
        "torch_uncertainty.utils",
    ):  # their __init__ imports torchvision, the rest does not
        package = types.ModuleType(name)
        package.__path__ = [str(Path(spec.origin).parents[1].joinpath(*name.split(".")))]
        sys.modules[name] = package
    from torch_uncertainty.layers import BayesLinear  # pyright: ignore[reportMissingImports]
    from torch_uncertainty.losses import KLDiv  # pyright: ignore[reportMissingImports]
    from torch_uncertainty.post_processing import TemperatureScaler  # pyright: ignore[reportMissingImports]

    std = 0.05
    layers = [BayesLinear(2, 8, prior_sigma_1=1.0), nn.Tanh(), BayesLinear(8, 1, prior_sigma_1=1.0)]
    with torch.no_grad():
        for layer, plain in ((layers[0], net[0]), (layers[2], net[2])):
            for name in ("weight", "bias"):
                getattr(layer, f"{name}_mu").copy_(getattr(plain, name))
                getattr(layer, f"{name}_sigma").fill_(float(torch.tensor(std).expm1().log()))
        converted = nn.Sequential(*layers)
        torch.manual_seed(0)
        outputs, divergences = [], []
        for _ in range(4000):
            outputs.append(converted(places.float()))
            divergences.append(KLDiv(converted)())
    classifier, labels = classes(net, y)
    scaler = TemperatureScaler(classifier.float())
    scaler.fit(DataLoader(TensorDataset(x.float(), labels), batch_size=40), progress=False)
    stacked = torch.stack(outputs)
    return {
        "std": std,
        "kl": float(torch.cat(divergences).mean()),
        "kl_error": float(torch.cat(divergences).std() / 4000**0.5),
        "mean": stacked.mean(0).flatten().tolist(),
        "output_std": stacked.std(0).flatten().tolist(),
        "temperature": float(scaler.temperature[0].detach()),
    }


def main(out: Path = OUT) -> None:
    """Ask each library; answers go to a file."""
    net, x, y, places = problem()
    stored: dict = {
        "problem": {
            "x": x.tolist(),
            "y": y.tolist(),
            "places": places.tolist(),
            "weights": {name: tensor.tolist() for name, tensor in net.state_dict().items()},
        },
        "versions": {"torch": torch.__version__},
    }
    libraries = {
        "laplace-torch": laplace_torch,
        "bayesian-torch": bayesian_torch,
        "torch-uncertainty": torch_uncertainty,
    }
    for name, ask in libraries.items():
        stored[name] = ask(copy.deepcopy(net), x, y, places)
        stored["versions"][name] = importlib.metadata.version(name)
    out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{out}: {stored['versions']}\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

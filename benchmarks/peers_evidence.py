"""laplace-torch's training by marginal likelihood on two tiny networks, stored: `make bench-env`.

tests/inference/test_inference_laplace_online.py trains ours from the same weights on the same rows and compares with
benchmarks/results/peers_evidence.json. Nothing of dubito is imported.
"""

import importlib.metadata
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

OUT = Path(__file__).parent / "results" / "peers_evidence.json"
EPOCHS, RATE, ROWS = 1500, 1e-2, 60


def problems() -> dict[str, tuple[nn.Sequential, Tensor, Tensor]]:
    """Start, inputs and targets: reals with one output, and three classes, in float64."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, 2, dtype=torch.float64)
    y = torch.sin(2 * x.sum(1, keepdim=True)) + 0.2 * torch.randn(ROWS, 1, dtype=torch.float64)
    angle = torch.atan2(x[:, 1], x[:, 0]) + 0.5 * torch.randn(ROWS, dtype=torch.float64)
    labels = ((angle + torch.pi) / (2 * torch.pi) * 3).long().clamp(0, 2)
    reals = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    classes = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return {"regression": (reals, x, y), "classification": (classes, x, labels)}


def main() -> None:
    """Train both under a diagonal and under Kronecker factors, with one prior precision for all weights."""
    from laplace.curvature import BackPackGGN  # pyright: ignore[reportMissingImports]
    from laplace.marglik_training import marglik_training  # pyright: ignore[reportMissingImports]

    stored: dict = {"versions": {"torch": torch.__version__}, "epochs": EPOCHS, "lr": RATE, "networks": {}}
    stored["versions"]["laplace-torch"] = importlib.metadata.version("laplace-torch")
    torch.set_default_dtype(torch.float64)  # its log precisions and noise take the default
    for task, (net, x, y) in problems().items():
        start, answers = {name: tensor.tolist() for name, tensor in net.state_dict().items()}, {}
        for structure in ("diag", "kron"):
            net.load_state_dict({name: torch.tensor(value) for name, value in start.items()})
            la, _, curve, _ = marglik_training(
                net,
                DataLoader(TensorDataset(x, y), batch_size=ROWS),
                task,
                hessian_structure=structure,
                backend=BackPackGGN,
                optimizer_kwargs={"lr": RATE},
                n_epochs=EPOCHS,
                prior_structure="scalar",
                marglik_frequency=5,
            )
            answers[structure] = {
                "prior_precision": float(la.prior_precision),
                "noise": float(la.sigma_noise) if task == "regression" else None,
                "log_marginal_likelihood": la.log_marginal_likelihood().item(),
                "best": -min(curve),
            }
        stored["networks"][task] = {"start": start, "x": x.tolist(), "y": y.tolist(), "answers": answers}
    OUT.write_text(json.dumps(stored) + "\n", encoding="utf-8")
    for task, kept in stored["networks"].items():
        sys.stdout.write(f"{task}: {json.dumps(kept['answers'], indent=1)}\n")


if __name__ == "__main__":
    main()

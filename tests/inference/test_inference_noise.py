"""Noise in training is drawn sparingly, and still no two rows, halves of a batch, passes or components are correlated.

Marginals, losses and gradients on average do not show whether noise is shared: only the variance of gradients grows.
Identical rows show it, for what their outputs have in common is then noise alone.
"""

import pytest
import torch
from torch import Tensor, nn

from dubito import Flipout, Gaussian, Implicit, LocalReparameterised, MCDropout, MeanField, Rank1
from dubito.inputs import Batch

ROWS, DRAWS = 5, 1500
#: By method: the settings, and how many passes a row makes. Implicit has one component, so that rows are alike.
CASES = {
    "rank-1, in a tile": (Rank1(components=3, initial_rate=0.2, arrangement="tile"), 3),
    "rank-1, in a loop": (Rank1(components=3, initial_rate=0.2, arrangement="loop"), 3),
    "rank-1, inputs alone": (Rank1(components=2, initial_rate=0.2, on="input"), 2),
    "rank-1, outputs alone": (Rank1(components=2, initial_rate=0.2, on="output"), 2),
    "implicit": (Implicit(components=1, noise_samples=2, initial_std=0.5), 2),
    "MC dropout": (MCDropout(rate=0.4), 1),
    "local reparameterisation": (MeanField(initial_std=0.3, estimator=LocalReparameterised()), 1),
    "flipout": (MeanField(initial_std=0.3, estimator=Flipout(), subset=("0.weight", "1.weight")), 1),
}


def outputs_of_identical_rows(method, passes: int) -> Tensor:
    """Outputs in training, [draws, passes · rows]: those of all passes over five rows that are the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    built = method.build(net, Gaussian(std=1.0), ROWS)
    inputs = torch.tensor([[0.7, -1.1, 0.4]], dtype=torch.float64).expand(ROWS, 3)
    targets = torch.zeros(ROWS, 1, dtype=torch.float64)
    built.loss(inputs, targets, generator=torch.Generator().manual_seed(0))  # learns where noise can stand
    drawn = []
    with torch.no_grad():
        for seed in range(DRAWS):
            outputs = built.outputs(Batch(inputs, targets), torch.Generator().manual_seed(seed))
            drawn.append(outputs.reshape(passes * ROWS))
    return torch.stack(drawn)


@pytest.mark.parametrize("name", CASES)
def test_rows_halves_passes_and_components_are_uncorrelated(name: str):
    method, passes = CASES[name]
    drawn = outputs_of_identical_rows(method, passes)
    unit = (drawn - drawn.mean(0)) / drawn.std(0)
    products = unit[:, :, None] * unit[:, None]
    error = products.std(0) / DRAWS**0.5
    apart = ~torch.eye(passes * ROWS, dtype=torch.bool)
    assert (products.mean(0).abs() < 5 * error)[apart].all()
    assert error[apart].max() < 0.08  # a correlation of 0.4 would be seen
    # Rows of one pass have noise of the same size, the second half's as the first's.
    variances = drawn.var(0).view(passes, ROWS)
    relative = (unit**2).std(0).view(passes, ROWS) / DRAWS**0.5
    assert (variances > 0).all()
    assert ((variances / variances.mean(1, keepdim=True) - 1).abs() < 5 * relative).all()

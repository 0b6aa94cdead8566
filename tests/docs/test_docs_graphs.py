"""The page on graphs runs, its wrapper serves every family, and graphs as inputs are refused with a word on it."""

from pathlib import Path

import pytest
import torch
from torch import nn

import dubito
from dubito import Categorical, DataError, Diagonal, Gaussian, Laplace, Training
from tests.docs.pages import run

PAGE = Path(__file__).parent.parent.parent / "docs" / "graphs.md"
QUICK = Training(iterations=10, batch_size=8, lr=1e-2)


@pytest.fixture(scope="module")
def space():
    return run(PAGE)


def test_the_page_runs_and_both_wrappers_are_one_function(space):
    nodes = torch.tensor([3, 0, 3, 59])
    torch.testing.assert_close(space["net"](nodes), space["cheap"](nodes))
    epistemic = space["posterior"].predict(torch.arange(60)).epistemic
    assert (epistemic > 0).all()


@pytest.mark.parametrize("name", ["laplace-kfac", "mean-field", "rank1", "deep-ensemble", "bali", "mc-dropout"])
def test_the_wrapper_serves_every_family(space, name, tmp_path):
    data = space["known"], space["classes"][:20]
    posterior = dubito.methods()[name].fit(space["net"], data, Categorical(), training=QUICK)
    points = [row.name for row in posterior.summary().rows if row.holds.startswith("point")]
    assert not [point for point in points if name != "mc-dropout" and "weight" in point]
    assert not any("per component and batch" in row.holds for row in posterior.summary().rows)
    nodes = torch.tensor([5, 50])
    whole = posterior.predict(torch.arange(60), 8).probs
    torch.testing.assert_close(posterior.predict(nodes, 8).probs, whole[nodes], rtol=1e-4, atol=1e-5)
    posterior.save(tmp_path / "p.safetensors")
    again = dubito.load(tmp_path / "p.safetensors", space["net"])
    assert torch.equal(again.predict(nodes, 4).probs, posterior.predict(nodes, 4).probs)


def test_curvature_of_copies_is_that_of_the_nodes(space):
    """Laplace's diagonal against the Jacobians of single nodes, by autograd through the plain network."""
    torch.manual_seed(1)
    x, edges, known = space["x"].double(), space["edge_index"], space["known"]
    network = space["GCN"](4, 3, 1).double()
    method = Laplace(structure=Diagonal(), prior_precision=2.0)
    targets = network(x, edges)[known, 0].detach()
    posterior = method.fit(space["OnNodes"](network, x, edges), (known, targets), Gaussian(std=0.5))
    weights = list(network.parameters())
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(network(x, edges)[n, 0], weights)]) for n in range(60)]
    jacobians = torch.stack(rows)
    precision = 2.0 + (jacobians[:20] ** 2).sum(0) / 0.25
    expected = (jacobians**2 / precision).sum(1)
    torch.testing.assert_close(posterior.predict(torch.arange(60)).epistemic[:, 0], expected, rtol=1e-8, atol=1e-12)


def test_graphs_as_inputs_are_refused_with_the_remedy(space):
    x, edges, targets = space["x"], space["edge_index"], space["classes"]
    with pytest.raises(DataError, match=r"inputs\[1\]': 2}; what belongs to all rows.*buffer.*page Graphs"):
        dubito.MeanField().fit(space["GCN"](4, 8, 2), ((x, edges), targets), Categorical(), training=QUICK)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = space["GCN"](4, 8, 2)

        def forward(self, x):
            return self.network(x, edges)

    with pytest.raises(DataError, match=r"reads all 60 rows together, and not the first 8 alone.*page Graphs"):
        dubito.MeanField().fit(Whole(), (x, targets), Categorical(), training=QUICK)
    with pytest.raises(DataError, match=r"cannot read inputs of shape"):  # neither all nor some
        dubito.MeanField().fit(nn.Linear(5, 2), (x, targets), Categorical(), training=QUICK)

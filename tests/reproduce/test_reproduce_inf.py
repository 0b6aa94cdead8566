"""INF's tables: the exact information against automatic differentiation, and what is counted."""

import pytest
import torch
from torch.func import functional_call, grad, vmap

from dubito.data import Part
from dubito.models import mlp
from dubito.reproduce import inf_information, inf_sizes
from dubito.reproduce.experiment import Cell


def test_the_exact_information_is_that_of_automatic_differentiation():
    net = mlp(3, (5,), num_classes=1, seed=2).double()
    inputs = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = {name: parameter.detach() for name, parameter in net.named_parameters()}
    each = vmap(grad(lambda w, x: functional_call(net, w, (x[None],))[0, 0]), (None, 0))(own, inputs)
    weight, bias = list(own)[:2]
    delta = torch.cat([each[weight], each[bias][..., None]], -1).flatten(1)
    truth = delta.T @ delta / len(inputs)
    torch.testing.assert_close(inf_information.exact_information(net, Part(inputs, inputs[:, :1])), truth)


def test_what_must_hold_of_the_errors():
    part = inf_information.generate_cell(Cell("yacht", "kfac"))
    found = inf_information.errors(part, inf_information.Network(hidden=8), seed=0, steps=30)
    for method in ("inf", "inf-5%", "inf-guarded"):
        assert found[method]["diagonal"] < 1e-12
    assert found["inf"]["off_diagonal"] == pytest.approx(found["efb"]["off_diagonal"])
    for method in ("kfac", "efb"):
        assert found[method]["diagonal"] > 1e-3


@pytest.mark.parametrize("network", inf_sizes.NETWORKS)
def test_the_papers_integers(network: str):
    for method in inf_sizes.METHODS:
        cell = Cell(network, method)
        (outcome,) = inf_sizes.count([cell], [inf_sizes.build(cell)], inf_sizes.Count(), None)
        assert outcome.metrics["numbers"] == inf_sizes.published()[network, method, "numbers"].value

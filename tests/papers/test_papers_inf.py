"""INF's tables: the exact information against automatic differentiation, and what is counted."""

import pytest
import torch
from torch.func import functional_call, grad, vmap

from dubito import Categorical, Laplace
from dubito.curvature import GGN, find_blocks, statistics
from dubito.data import Part
from dubito.inference.laplace import INF
from dubito.inputs import Batch
from dubito.models import lenet, mlp, resnet18
from dubito.sources import TensorSource
from papers.inf import lemma_1, table_1, table_3, table_3_trained
from papers.runner.experiment import Cell


def test_the_exact_information_is_that_of_automatic_differentiation():
    net = mlp(3, (5,), num_classes=1, seed=2).double()
    inputs = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = {name: parameter.detach() for name, parameter in net.named_parameters()}
    each = vmap(grad(lambda w, x: functional_call(net, w, (x[None],))[0, 0]), (None, 0))(own, inputs)
    weight, bias = list(own)[:2]
    delta = torch.cat([each[weight], each[bias][..., None]], -1).flatten(1)
    truth = delta.T @ delta / len(inputs)
    torch.testing.assert_close(table_1.exact_information(net, Part(inputs, inputs[:, :1])), truth)


def test_what_must_hold_of_the_errors():
    part = table_1.generate_cell(Cell("yacht", "kfac"))
    found = table_1.errors(part, table_1.Network(hidden=8), seed=0, steps=30)
    for method in ("inf", "inf-5%", "inf-guarded"):
        assert found[method]["diagonal"] < 1e-12
    assert found["inf"]["off_diagonal"] == pytest.approx(found["efb"]["off_diagonal"])
    for method in ("kfac", "efb"):
        assert found[method]["diagonal"] > 1e-3


@pytest.mark.parametrize("network", table_3.NETWORKS)
def test_the_papers_integers(network: str):
    for method in table_3.METHODS:
        cell = Cell(network, method)
        (outcome,) = table_3.count([cell], [table_3.build(cell)], table_3.Count(), None)
        assert outcome.metrics["numbers"] == table_3.published()[network, method, "numbers"].value


@pytest.mark.parametrize("kind", ["mlp", "lenet"])
def test_errors_without_the_matrix_are_those_of_the_matrix(kind: str):
    generator = torch.Generator().manual_seed(0)
    if kind == "mlp":
        net = mlp(4, (7, 3), num_classes=3, seed=1).double()
        inputs = torch.randn(12, 4, dtype=torch.float64, generator=generator)
    else:
        net = lenet(channels=(2, 3), dense=(4,), kernel_size=3, image_size=8, num_classes=3).double()
        inputs = torch.randn(9, 1, 8, 8, dtype=torch.float64, generator=generator)
    targets = torch.arange(len(inputs)) % 3
    likelihood = Categorical().build(net(inputs))
    covered = find_blocks(net, inputs, list(dict(net.named_parameters())))
    blocks = list(covered.blocks.values())
    means = statistics(
        net, covered, TensorSource(Batch(inputs, targets)), likelihood, GGN(), kronecker=True, eigenvalues=True,
        diagonal=True, batch_size=4, seed=0,
    )  # fmt: skip
    assert len(blocks) == (3 if kind == "mlp" else 4)
    for block in blocks:
        deltas = lemma_1.row_gradients(net, likelihood, block, inputs)
        truth = deltas.flatten(1).T @ deltas.flatten(1) / len(inputs)
        own = means[block.name]
        torch.testing.assert_close(truth.diagonal().reshape(block.rows, -1), own.diagonal[0])
        dense = dict(table_1.approximations(own))
        found = lemma_1.squared_errors(deltas, len(inputs), own)
        assert found["information"] == pytest.approx(float(truth.square().sum()))
        for ours, theirs in (("kfac", "kfac"), ("efb", "efb"), ("inf", "inf-guarded")):
            expected = float((truth - dense[theirs]).square().sum())
            assert found[ours] == pytest.approx(expected, rel=1e-8, abs=1e-12 * found["information"])


def test_what_inf_keeps_is_counted():
    net = resnet18(base=4, num_classes=10).double()
    inputs = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = (inputs, torch.arange(6))
    with pytest.warns(match="no better than a constant"):
        posterior = Laplace(structure=INF(rank=10), subset=table_3_trained.kernels(net)).fit(net, data, Categorical())
    found = table_3_trained.sizes(posterior)
    layers = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(posterior.blocks) == len(layers)
    diagonal = sum(block.rows * block.columns for block in posterior.blocks.values())
    more = 0
    for block in posterior.blocks.values():
        (_, g), (_, a) = (posterior.block_tensors(block)[f"{side}_vectors"].shape[1:] for side in ("output", "input"))
        more += g * block.rows + a * block.columns + g * a
    assert found["numbers"] == diagonal + more
    assert found["ratio"] == pytest.approx((diagonal + more) / diagonal)
    weights = sum(tensor.nbytes for tensor in net.state_dict().values())
    assert found["whole"] == pytest.approx((weights + 8 * (diagonal + more)) / (weights + 8 * diagonal))

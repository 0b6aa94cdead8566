"""The pair products against V = U_g ⊗ U_a written out, and how much memory they touch."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dubito.distributions import SparseInformationNormal, pair_products
from dubito.seeds import generator

SHAPES = [(5, 3, 4, 2), (3, 3, 7, 5), (9, 2, 3, 3), (1, 1, 4, 2), (4, 4, 1, 1)]


def bases(m, g, n, a):
    draw = generator(0)
    return (
        torch.randn(m, g, generator=draw, dtype=torch.float64),
        torch.randn(n, a, generator=draw, dtype=torch.float64),
        torch.rand(m, n, generator=draw, dtype=torch.float64),
        torch.rand(g, a, generator=draw, dtype=torch.float64),
    )


@pytest.mark.parametrize("chunk", [1, 10, 2**22])
@pytest.mark.parametrize("shape", SHAPES)
def test_gram_is_that_of_the_dense_basis(monkeypatch, shape, chunk):
    monkeypatch.setattr(pair_products, "CHUNK", chunk)
    left, right, weight, scale = bases(*shape)
    basis = torch.kron(left, right) * scale.flatten()
    truth = basis.mT @ torch.diag(weight.flatten()) @ basis
    found = pair_products.unfold(pair_products.gram(left, right, weight), scale)
    torch.testing.assert_close(found, truth, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("chunk", [1, 30, 2**22])
@pytest.mark.parametrize("shape", SHAPES)
def test_squared_norms_are_those_of_the_dense_product(monkeypatch, shape, chunk):
    monkeypatch.setattr(pair_products, "CHUNK", chunk)
    left, right, weight, scale = bases(*shape)
    rows = torch.randn(6, *scale.shape, generator=generator(1), dtype=torch.float64)
    truth = (rows.flatten(1) @ torch.kron(left, right).mT).square().sum(0).view(weight.shape)
    torch.testing.assert_close(pair_products.squared_norms(left, right, rows), truth, atol=1e-12, rtol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().size() > 0:
                self.entries = max(self.entries, tensor.untyped_storage().size() // tensor.element_size())
        return out


@pytest.mark.parametrize(("m", "g", "n", "a"), [(60, 2, 70, 3), (60, 8, 70, 4), (10, 1, 70, 30)])
def test_nothing_larger_than_the_layer_the_gram_or_a_chunk_is_formed(monkeypatch, m, g, n, a):
    monkeypatch.setattr(pair_products, "CHUNK", 1000)
    normal = SparseInformationNormal(
        torch.zeros(m, n),
        torch.linalg.qr(torch.randn(m, g, generator=generator(2))).Q,
        torch.linalg.qr(torch.randn(n, a, generator=generator(3))).Q,
        torch.rand(g, a, generator=generator(4)),
        torch.rand(m, n, generator=generator(5)),
        num_data=10.0,
        prior_precision=1.0,
    )
    with LargestTensor() as largest:
        normal.sample(generator=generator(6))
        normal.variance, normal.entropy(), normal.negative_share
        normal.log_prob(normal.mean)
        normal.solve(normal.mean)
    size = g * a
    assert m * n <= largest.entries <= max(m * n, n * a, size**2, 1000) < m * n * size

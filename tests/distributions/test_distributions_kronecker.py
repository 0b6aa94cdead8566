"""KFAC and EFB: the prior is added exactly, and the basis is read in the right order."""

import pytest
import torch

from dubito.distributions import KroneckerNormal
from dubito.distributions.linalg import eigh
from dubito.errors import DataError


def test_the_prior_is_added_to_the_product_and_not_to_the_factors(fisher_layer):
    layer = fisher_layer(3, 5)
    normal = layer.kronecker(num_data=50.0, prior_precision=0.7)
    output_eigenvalues = torch.linalg.eigvalsh(layer.output_factor)
    input_eigenvalues = torch.linalg.eigvalsh(layer.input_factor)
    truth = 50.0 * torch.outer(output_eigenvalues, input_eigenvalues) + 0.7
    torch.testing.assert_close(normal.precision_eigenvalues, truth, atol=1e-12, rtol=0)
    split = torch.outer((50.0**0.5 * output_eigenvalues + 0.7**0.5), (50.0**0.5 * input_eigenvalues + 0.7**0.5))
    assert (normal.precision_eigenvalues - split).abs().max() > 0.1


def test_both_are_exact_for_one_example(layer_of):
    """The information of one example is exactly G ⊗ A."""
    layer = layer_of([[0.5, -1.0, 2.0, 1.0]], [[1.0, 3.0]])
    truth = 50.0 * layer.information + 0.7 * torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(layer.kronecker().precision_matrix, truth)
    torch.testing.assert_close(layer.eigen_kronecker().precision_matrix, truth)


def test_eigen_kronecker_has_the_exact_trace_whatever_the_number_of_examples(fisher_layer):
    """Its eigenvalues are means over examples, as the exact diagonal is."""
    for examples in (1, 2, 7, 30):
        layer = fisher_layer(3, 5, examples=examples, positions=2)
        normal = layer.eigen_kronecker(num_data=1.0, prior_precision=1e-9)
        torch.testing.assert_close(normal.precision_eigenvalues.sum(), layer.diagonal.sum())


def test_factors_that_are_no_factors_are_refused():
    mean = torch.zeros(2, 3)
    options = {"num_data": 1.0, "prior_precision": 1.0}
    with pytest.raises(DataError, match="output_factor must be positive semi-definite, got eigenvalues from -1"):
        eigh(-torch.eye(2), name="output_factor")
    with pytest.raises(DataError, match=r"input_factor must be a square matrix, got shape \(3, 2\)"):
        eigh(torch.zeros(3, 2), name="input_factor")
    with pytest.raises(DataError, match=r"output_vectors must have shape \(2, 2\)"):
        KroneckerNormal(mean, torch.eye(3), torch.ones(3), torch.eye(2), torch.ones(2), **options)

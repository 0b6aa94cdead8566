"""The paper's lemmas, on layers made of random inputs and gradients.

Errors are Frobenius distances to the exact Fisher information I. Lemma 1: INF's is at most EFB's. Corollary 1:
INF's is at most KFAC's. Lemma 2: INF's diagonal is exact. The first two need full rank and hold without a guard
and under the clamp; the third is what the congruence guard restores, at every rank, at the price of the first.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

PRIOR = 1.0
RULES = settings(max_examples=60, deadline=None, derandomize=True)
LAYERS = {
    "m": st.integers(1, 4),
    "n": st.integers(1, 5),
    "examples": st.integers(1, 12),
    "positions": st.integers(1, 3),
    "seed": st.integers(0, 2**31),
}
RANKS = st.one_of(st.integers(1, 20), st.floats(0.01, 1.0))


def information(normal):
    """What a distribution takes for the Fisher information: its precision without prior and scale."""
    precision = normal.precision_matrix
    return (precision - PRIOR * torch.eye(len(precision), dtype=precision.dtype)) / normal.num_data


def errors(layer):
    """Frobenius errors of KFAC, EFB, INF without a guard, and of INF under each guard at full rank."""
    options = {"num_data": 1.0, "prior_precision": PRIOR}
    exact = layer.information
    eigen = information(layer.eigen_kronecker(**options))
    unguarded = eigen + torch.diag(layer.sparse(1.0, **options).correction.flatten())
    estimates = {
        "kfac": information(layer.kronecker(**options)),
        "efb": eigen,
        "unguarded": unguarded,
        "clamp": information(layer.sparse(1.0, guard="clamp", **options)),
        "congruence": information(layer.sparse(1.0, guard="congruence", **options)),
    }
    # Sums of mn terms and a prior taken off again: a few eps of the largest entries.
    rounding = 1e-12 * (PRIOR + float(exact.norm()))
    return {name: float((exact - estimate).norm()) for name, estimate in estimates.items()}, rounding


@RULES
@given(**LAYERS)
def test_lemma_1_and_corollary_1_at_full_rank(fisher_layer, m, n, examples, positions, seed):
    error, rounding = errors(fisher_layer(m, n, examples=examples, positions=positions, seed=seed))
    for name in ("unguarded", "clamp"):
        assert error[name] <= error["efb"] + rounding  # Lemma 1
        assert error[name] <= error["kfac"] + rounding  # Corollary 1
    assert error["efb"] <= error["kfac"] + rounding


@RULES
@given(rank=RANKS, method=st.sampled_from(["algorithm1", "rectangle"]), **LAYERS)
def test_lemma_2_under_the_congruence_guard_at_every_rank(fisher_layer, m, n, examples, positions, seed, rank, method):
    layer = fisher_layer(m, n, examples=examples, positions=positions, seed=seed)
    normal = layer.sparse(rank, method=method, num_data=1.0, prior_precision=PRIOR)
    found = information(normal).diagonal().view(m, n)
    rounding = 1e-12 * (PRIOR + float(layer.diagonal.max()))
    torch.testing.assert_close(found, layer.diagonal, atol=rounding, rtol=0)


@RULES
@given(rank=RANKS, guard=st.sampled_from(["congruence", "clamp"]), **LAYERS)
def test_both_guards_are_positive_definite_at_every_rank(fisher_layer, m, n, examples, positions, seed, rank, guard):
    layer = fisher_layer(m, n, examples=examples, positions=positions, seed=seed)
    normal = layer.sparse(rank, guard=guard, num_data=1.0, prior_precision=PRIOR)
    rounding = 1e-12 * (PRIOR + float(layer.diagonal.max()))
    assert torch.linalg.eigvalsh(normal.precision_matrix).min() >= PRIOR - rounding


@RULES
@given(**LAYERS)
def test_the_trace_in_the_eigenbasis_is_the_trace_of_the_exact_diagonal(fisher_layer, m, n, examples, positions, seed):
    layer = fisher_layer(m, n, examples=examples, positions=positions, seed=seed)
    torch.testing.assert_close(layer.eigenvalues.sum(), layer.diagonal.sum(), rtol=1e-12, atol=0)


def test_lemma_1_is_no_theorem_under_the_congruence_guard(layer_of):
    """A layer where shrinking rows and columns costs more than the exact diagonal gains."""
    layer = layer_of([[1, 1], [-1, -1], [-1, 0]], [[-2, 3], [0, -3], [1, -3]])
    error, _ = errors(layer)
    assert error["congruence"] > 1.2 * error["efb"]
    assert error["clamp"] < error["efb"] and error["unguarded"] < error["efb"]


def test_lemma_1_needs_full_rank(layer_of):
    """At rank 2 even the estimate without a guard can lose to EFB."""
    layer = layer_of([[2, 1], [0, 1], [2, 1]], [[1, -3], [-2, 2], [-3, 1]])
    normal = layer.sparse(2)
    basis = torch.kron(normal.output_vectors, normal.input_vectors)
    unguarded = basis @ torch.diag(normal.eigenvalues.flatten()) @ basis.mT
    unguarded += torch.diag(normal.correction.flatten())
    assert (layer.information - unguarded).norm() > 4 * errors(layer)[0]["efb"]

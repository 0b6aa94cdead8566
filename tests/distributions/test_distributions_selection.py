"""Algorithm 1 against its printed form, and the best rectangle against all rectangles."""

from itertools import combinations

import pytest
import torch

from dubito.distributions import select
from dubito.distributions.selection import resolve_rank
from dubito.errors import ConfigError, DataError, UnknownNameError
from dubito.seeds import generator


def spectrum(m, n, seed=0):
    """Eigenvalues that fall off steeply, without ties."""
    noise = torch.randn(m, n, generator=generator(seed), dtype=torch.float64)
    return (1.5 * noise).exp()


def printed_algorithm1(eigenvalues, rank):
    """Algorithm 1 as printed: i, β and ζ count from 1, Λ is stacked column by column; β as it is meant."""
    m = len(eigenvalues)
    stacked = eigenvalues.mT.flatten().tolist()
    top = sorted(range(1, len(stacked) + 1), key=lambda i: -stacked[i - 1])[:rank]
    betas = [(i - 1) // m + 1 for i in top]
    zetas = [i - m * (beta - 1) for i, beta in zip(top, betas, strict=True)]
    return sorted({zeta - 1 for zeta in zetas}), sorted({beta - 1 for beta in betas})


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (1, 4), (4, 1), (6, 6)])
def test_algorithm1_is_the_printed_one_at_every_rank(shape):
    eigenvalues = spectrum(*shape)
    for rank in range(1, eigenvalues.numel() + 1):
        kept = select(eigenvalues, rank)
        rows, columns = printed_algorithm1(eigenvalues, rank)
        assert kept.output_index.tolist() == rows
        assert kept.input_index.tolist() == columns
        assert kept.rank == kept.requested_rank == rank
        assert kept.size == len(rows) * len(columns) >= rank


def test_the_papers_example():
    """Six eigenvalues in order: the three largest need a fourth to complete the rectangle."""
    eigenvalues = torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]).view(3, 2).mT  # stacked by columns, m = 2
    kept = select(eigenvalues, 3)
    assert kept.output_index.tolist() == [0, 1] and kept.input_index.tolist() == [0, 1]
    assert kept.size == 4
    assert kept.captured_trace == pytest.approx(18 / 21)


def test_the_last_row_is_not_taken_for_the_next_column():
    """The printed β = floor(i/m) + 1 puts i = m, the last row of a column, into the next column."""
    eigenvalues = torch.zeros(3, 4)
    eigenvalues[2, 0] = 1.0  # i = m = 3
    kept = select(eigenvalues, 1)
    assert kept.output_index.tolist() == [2] and kept.input_index.tolist() == [0]
    assert kept.captured_trace == 1.0


@pytest.mark.parametrize("method", ["algorithm1", "rectangle"])
def test_the_limit_stops_at_the_largest_rank_that_fits(method):
    eigenvalues = spectrum(5, 7, seed=3)
    sizes = [select(eigenvalues, rank).size for rank in range(1, 36)]
    for limit in range(1, 36):
        kept = select(eigenvalues, 30, method=method, max_size=limit)
        fitting = [rank for rank in range(1, 31) if sizes[rank - 1] <= limit]
        assert kept.rank == max(fitting)
        assert kept.requested_rank == 30
        assert kept.size <= sizes[kept.rank - 1] <= limit


def test_captured_trace_is_the_share_inside():
    eigenvalues = spectrum(4, 6)
    for method in ("algorithm1", "rectangle"):
        kept = select(eigenvalues, 5, method=method)
        inside = sum(float(eigenvalues[i, j]) for i in kept.output_index for j in kept.input_index)
        assert kept.captured_trace == pytest.approx(inside / float(eigenvalues.sum()))
    assert select(eigenvalues, 1.0).captured_trace == 1.0
    assert select(torch.zeros(2, 3), 1).captured_trace == 1.0


@pytest.mark.parametrize("seed", range(8))
def test_the_best_rectangle_never_captures_less_nor_takes_more(seed):
    eigenvalues = spectrum(9, 12, seed)
    for rank in (1, 4, 10, 0.2, 0.5, 1.0):
        first, best = select(eigenvalues, rank), select(eigenvalues, rank, method="rectangle")
        assert best.size <= first.size
        assert best.captured_trace >= first.captured_trace - 1e-12
        assert best.rank == first.rank


def test_the_best_rectangle_captures_more_on_the_whole():
    gain = [
        select(spectrum(9, 12, seed), 10, method="rectangle").captured_trace
        - select(spectrum(9, 12, seed), 10).captured_trace
        for seed in range(20)
    ]
    assert sum(gain) / len(gain) > 0.01


def test_the_best_rectangle_is_the_best_of_all_or_close():
    """Turns over rows and columns find a local best: within 5 % of the best of all rectangles of that size."""
    for seed in range(10):
        eigenvalues = spectrum(4, 5, seed)
        found = select(eigenvalues, 3, method="rectangle")
        limit = select(eigenvalues, 3).size
        best = max(
            float(eigenvalues[list(rows)][:, list(columns)].sum())
            for g in range(1, 5)
            for a in range(1, min(5, limit // g) + 1)
            for rows in combinations(range(4), g)
            for columns in combinations(range(5), a)
        )
        assert found.captured_trace >= 0.95 * best / float(eigenvalues.sum())


def test_a_planted_rectangle_is_found():
    eigenvalues = torch.full((6, 8), 0.01)
    eigenvalues[1, 3] = eigenvalues[1, 6] = eigenvalues[4, 3] = eigenvalues[4, 6] = 1.0
    eigenvalues[2, 0] = 1.5  # Algorithm 1 takes it first, and its row and column with it
    kept = select(eigenvalues, 3, method="rectangle", max_size=4)
    assert kept.size <= 4
    alone = select(eigenvalues, 3, max_size=4)
    assert kept.captured_trace >= alone.captured_trace
    kept = select(eigenvalues, 2, method="rectangle")
    assert kept.output_index.tolist() == [1, 4] and kept.input_index.tolist() == [3, 6]


@pytest.mark.parametrize(
    ("rank", "total", "expected"),
    [(3, 20, 3), (100, 20, 20), (0.05, 20, 1), (0.2, 20, 4), (0.5, 20, 10), (1.0, 20, 20), (1, 20, 1),
     (0.001, 20, 1), (0.07, 100, 7), (0.29, 100, 29)],
)  # fmt: skip
def test_rank_is_a_count_or_a_fraction_by_its_type(rank, total, expected):
    assert resolve_rank(rank, total) == expected


@pytest.mark.parametrize("rank", [0, -1, 0.0, 1.5, 2.0, float("nan"), True, "5", None])
def test_other_ranks_are_refused(rank):
    with pytest.raises(ConfigError, match="rank"):
        select(torch.ones(2, 3), rank)


def test_bad_arguments_are_named():
    with pytest.raises(UnknownNameError, match=r"unknown method 'rectangel', did you mean 'rectangle'"):
        select(torch.ones(2, 3), 1, method="rectangel")
    with pytest.raises(ConfigError, match="max_size"):
        select(torch.ones(2, 3), 1, max_size=0)
    for bad in (torch.ones(3), torch.ones(0, 3), torch.tensor([[1.0, -1.0]]), torch.tensor([[float("nan")]])):
        with pytest.raises(DataError, match="eigenvalues must be"):
            select(bad, 1)


def test_wide_layers_are_quick():
    """A sort of the leading values only, whatever the layer's width: a Python loop would take minutes."""
    eigenvalues = spectrum(400, 785)
    kept = select(eigenvalues, 0.5, max_size=5000)
    assert kept.size <= 5000 and kept.requested_rank == 157_000

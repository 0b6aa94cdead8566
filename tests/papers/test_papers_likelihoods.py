"""The figures of the page on noise are those that are stored."""

import json
from pathlib import Path

import pytest

from papers.likelihoods import noise

PAGE = Path(__file__).parents[2] / "docs" / "likelihoods.md"


def test_the_page_shows_the_stored_figures() -> None:
    assert noise.table(json.loads(noise.RESULTS.read_text())) in PAGE.read_text()


def test_differences_are_those_of_splits() -> None:
    """Student's interval of 1, 2, 3: 2 ± 4.303 · 1 / √3."""
    splits = [{"chosen": {"nll": float(value)}, "gaussian": {"nll": 0.0}} for value in (1, 2, 3)]
    assert noise.less(splits, "nll") == "+2.000 ± 2.484"


def test_counts_are_made_with_more_spread_than_poissons(tmp_path: Path) -> None:
    noise.made_up(tmp_path / "counts.csv")
    counts = [float(line.rsplit(",", 1)[1]) for line in (tmp_path / "counts.csv").read_text().splitlines()[1:]]
    assert len(counts) == 4000 and all(count == round(count) >= 0 for count in counts)
    assert sum(counts) / 4000 == pytest.approx(3.9, abs=0.5)

"""The page on scikit-learn runs and shows its numbers."""

from pathlib import Path

from tests.docs.pages import run

PAGE = Path(__file__).parent.parent.parent / "docs" / "sklearn.md"


def test_the_page_runs():
    space = run(PAGE, least_outputs=3)
    inside = (space["low"] <= space["y_test"]) & (space["y_test"] <= space["high"])
    assert 0.8 < inside.mean() < 0.97 and space["far"] > 3 * space["near"]

"""Small comparisons, run once, whose pages are looked at."""

import pytest

from dubito import Training
from dubito.compare import Settings, compare
from dubito.report import write_page

QUICK = Training(iterations=40, batch_size=64, lr=5e-3)


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """Pages of a classification and a regression, with the comparisons' folders."""
    found = {}
    for data in ("digits", "diabetes", "sinc"):
        folder = tmp_path_factory.mktemp(data)
        compare(Settings(data=data, training=QUICK, num_samples=8), ["map", "mc-dropout", "k-tied"], out=folder)
        found[data] = write_page(folder)
    return found

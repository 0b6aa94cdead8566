"""Every module with parameters that PyTorch tests itself, through every method: it works, or says why not."""

import pytest

pytest.importorskip("expecttest")

from tests.layers.module_db import PAGE, REFUSED, VERSION, page, tried, with_parameters

#: What PyTorch says of its own examples.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")


def test_the_page_is_what_the_methods_do():
    """Making it goes through every module and method, and fails at errors of others, NaN and silent points."""
    made, text = page(), PAGE.read_text(encoding="utf-8")
    if f"PyTorch {VERSION}:" in text:  # the list is another in other versions
        assert made == text, "run: python -m tests.layers.module_db"


def test_the_list_is_whole():
    assert {"nn.Linear", "nn.LSTM", "nn.MultiheadAttention", "nn.Embedding", "nn.GroupNorm"} <= set(with_parameters())
    assert len(with_parameters()) >= 33  # 34 since PyTorch 2.13


def test_modules_without_tensors_are_refused_with_the_remedy():
    outcome = tried("nn.LazyConv1d", "map")
    assert outcome.word == REFUSED and "run the network on one batch first" in outcome.reason

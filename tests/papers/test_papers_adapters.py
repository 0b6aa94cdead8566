"""The comparison of adapters: on two made-up files as the real ones are shaped, and its table on the page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from papers.adapters import sentiment

WORDS = ["good", "bad", "film", "the", "a", "plot", "fine", "dull"]
PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"


def joined(lines: list[str]) -> np.ndarray:
    return np.frombuffer("\n".join(lines).encode(), np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stream = np.random.default_rng(0)
    words = stream.integers(4, 4 + len(WORDS), (40, 40)).astype(np.uint16)
    words[:, :20] = 0  # padded on the left
    classes = (words == 4).any(1).astype(np.uint8)
    parts: Any = {f"{key}_{part}": value for part in ("train", "test") for key, value in (("x", words), ("y", classes))}
    parts["vocab_utf8"] = joined(WORDS)
    np.savez(tmp_path / "imdb_top20k_len80.npz", **parts)
    sentences = ["the good film .", "a bad zebra plot", "fine", "the dull dull film"] * 10
    labels = np.array([1, 0, 1, 0] * 10, np.uint8)
    texts: Any = {f"text_{part}": joined(sentences) for part in ("train", "dev", "test")}
    texts |= {f"y_{part}": labels for part in ("train", "dev", "test")}
    np.savez(tmp_path / "sst2.npz", **texts)
    return tmp_path


def test_sentences_have_the_ids_of_the_reviews(folder: Path):
    _, _, ids = sentiment.imdb(folder, None)
    parts, unknown = sentiment.sst2(folder, ids, 12, length=3)
    first = parts["train"].words[:3].tolist()
    assert first == [[7, 4, 6], [5, 2, 9], [0, 0, 10]]  # the last words; the full stop is none
    assert unknown == pytest.approx(1 / 12)


@pytest.mark.filterwarnings("ignore::dubito.errors.DubitoWarning")  # networks this small learn nothing
def test_every_method_is_measured(folder: Path, capsys: pytest.CaptureFixture[str]):
    sizes = sentiment.Sizes(vocabulary=12, width=8, base_rows=None, base_epochs=1, rows=24, epochs=1)
    figures = sentiment.run(folder, sizes, seeds=(0,))
    assert figures["methods"].keys() == sentiment.methods().keys()
    assert figures["unknown words"] == pytest.approx(1 / 12)
    for (entry,) in figures["methods"].values():
        assert 0 < entry["nll"] < 3 and entry["bytes"] > 0
    assert len(sentiment.table(figures).splitlines()) == 2 + len(figures["methods"])


def test_adapters_start_as_the_base_does():
    torch.manual_seed(0)
    base = sentiment.Transformer(12, 8, 6)
    net = sentiment.adapted(base, 1)
    net.head = base.head
    words = torch.tensor([[0, 0, 4, 5, 6, 7]])
    torch.testing.assert_close(net(words), base(words))
    torch.testing.assert_close(base(words), base(words[:, 1:]))  # padding changes nothing


def test_the_page_shows_the_stored_figures():
    figures = json.loads(sentiment.RESULTS.read_text())
    assert sentiment.table(figures) in PAGE.read_text()
    assert f"{figures['unknown words']:.1%}".replace("%", " %") in PAGE.read_text()

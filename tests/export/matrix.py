"""Every registered method, network and likelihood to ONNX, beside `predict`: python -m tests.export.matrix.

Prints the farthest answer from `predict` (an interval's in standard deviations), and what is refused, in words; the
exit code is 1 where something else happened. Too long for the tests, which take some of these cases.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from dubito import DubitoError, methods
from dubito.inputs import take

from .test_export import INPUTS, answers, fitted, rows


class Attention(nn.Module):
    """A transformer's layer on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.encoder(x).mean(1))


def classifier() -> nn.Module:
    """A small BERT."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(intermediate_size=16, max_position_embeddings=4, num_labels=3, **sizes)
    return BertForSequenceClassification(config)


INPUTS["attention"] = (Attention, rows(12, 5, 8))
INPUTS["BERT"] = (classifier, {"input_ids": INPUTS["recurrent"][1]})
CASES = [
    *((network, "classes") for network in ("dense", "convolutional", "recurrent", "attention", "BERT")),
    *(("dense", name) for name in ("yes or no", "reals", "correlated", "heavy tails", "Poisson", "negative binomial")),
    ("four outputs", "own noise"),
]


def distance(posterior, inputs, path: Path) -> float:
    """The farthest answer of a file from the posterior's, at one row and at five."""
    farthest, closed = 0.0, posterior._linearises(None)
    predictor = posterior.sampled(4, seed=3).predict if closed else lambda few: posterior.predict(few, 4, seed=3)
    if closed and posterior.closed_form(inputs, 32, 0) is not None:
        predictor = posterior.predict
    for count in (1, 5):
        few = take(inputs, slice(count))
        answer, prediction = answers(path, inputs, count), predictor(few)
        scale = float(prediction.std.max()) if "std" in answer else 1.0
        ends = dict(zip(("lower", "upper"), prediction.interval(), strict=True)) if "lower" in answer else {}
        for name, values in answer.items():
            truth = ends[name] if name in ends else getattr(prediction, name)
            size = scale if name in ends else max(1.0, float(truth.abs().max()))
            farthest = max(farthest, float((values - truth).abs().max()) / size)
    return farthest


def main() -> int:
    """Go through all."""
    failed = False
    for name, method in methods().items():
        for network, likelihood in CASES:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.onnx"
                try:
                    posterior, inputs = fitted(method, network, likelihood)
                    posterior.export(path, num_samples=4, seed=3)
                    gap = distance(posterior, inputs, path)
                    failed |= not gap < 1e-5
                    outcome = f"{gap:.1e}"
                except DubitoError as error:
                    outcome = f"refused: {error}"
                except Exception as error:
                    outcome, failed = f"FAILED: {type(error).__name__}: {error}"[:300], True
            print(f"{name:22} {network:14} {likelihood:18} {outcome}", flush=True)
    return int(failed)


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())

"""A small transformer trained on IMDB, and posteriors over its adapters for SST-2, all from two files on disk.

`python -m papers.adapters.sentiment FOLDER` reads `imdb_top20k_len80.npz` and `sst2.npz` there, takes some minutes on
one core, and writes `sentiment.json` beside it, from which the table of `docs/adapters.md` comes. It is nobody's
benchmark: the base is small, and neither split nor training is one that others report.
"""

import json
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dubito
from dubito import (
    INF,
    KFAC,
    MAP,
    Categorical,
    DeepEnsemble,
    Implicit,
    KTied,
    Laplace,
    MCDropout,
    MeanField,
    Rank1,
    Training,
)

from ..runner import provenance
from ..settings import explicit

RESULTS = Path(__file__).with_suffix(".json")
SEEDS = (0, 1, 2)
#: Ids of padding and of words that the vocabulary lacks.
PADDING, UNKNOWN = 0, 2


class Rows(NamedTuple):
    """Word ids, padded on the left, and classes."""

    words: Tensor
    classes: Tensor


@dataclass(frozen=True)
class Sizes:
    """How large a run is.

    Attributes:
        vocabulary: the number of word ids.
        width: of the network.
        base_rows: of IMDB; None takes all.
        base_epochs: over them.
        rows: of SST-2 for the adapters.
        epochs: over them.
    """

    vocabulary: int = 20000
    width: int = 64
    base_rows: int | None = 12000
    base_epochs: int = 3
    rows: int = 3000
    epochs: int = 6


class LoRA(nn.Module):
    """W x + B A x, with W frozen."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Linear(base.in_features, rank, bias=False)
        self.B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.B(self.A(x))


class Block(nn.Module):
    """Attention and two dense layers, both beside the stream."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        inner = self.first(x)
        split = [
            layer(inner).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        attended = F.scaled_dot_product_attention(*split, attn_mask=mask[:, None, None])
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Two blocks over words, their mean, and a dense layer."""

    def __init__(self, vocabulary: int, width: int, length: int = 80) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        mask = words != PADDING
        places = torch.arange(words.shape[1], device=words.device).flip(0)  # the last word is at place 0
        x = self.words(words) + self.places(places)
        for block in self.blocks:
            x = block(x, mask)
        share = mask.to(x.dtype)[:, :, None]
        return self.head((x * share).sum(1) / share.sum(1).clamp(min=1))


def adapted(base: Transformer, seed: int, rank: int = 4) -> Transformer:
    """The base with adapters on queries and values, and a new head."""
    torch.manual_seed(seed)
    net = Transformer(base.words.num_embeddings, base.words.embedding_dim, base.places.num_embeddings)
    net.load_state_dict(base.state_dict())
    net.requires_grad_(False)
    for block in net.blocks:
        for name in ("query", "value"):
            setattr(block, name, LoRA(getattr(block, name), rank))
    net.head = nn.Linear(base.words.embedding_dim, 2)
    return net


def imdb(folder: Path, rows: int | None) -> tuple[Rows, Rows, dict[str, int]]:
    """Training rows, test rows, and the ids of words."""
    file = dict(np.load(folder / "imdb_top20k_len80.npz"))
    words = bytes(file["vocab_utf8"]).decode().split("\n")
    parts = [
        Rows(torch.tensor(file[f"x_{part}"][:rows].astype(np.int64)), torch.tensor(file[f"y_{part}"][:rows]).long())
        for part in ("train", "test")
    ]
    return parts[0], parts[1], {word: number + 4 for number, word in enumerate(words)}


def sst2(folder: Path, ids: dict[str, int], vocabulary: int, length: int = 40) -> tuple[dict[str, Rows], float]:
    """The parts of SST-2 in the ids of IMDB, and the share of words that these lack."""
    file, parts, unknown, count = dict(np.load(folder / "sst2.npz")), {}, 0, 0
    for part in ("train", "dev", "test"):
        sentences = bytes(file[f"text_{part}"]).decode().split("\n")
        table = torch.full((len(sentences), length), PADDING)
        for number, sentence in enumerate(sentences):
            words = [word for word in sentence.split(" ") if any(letter.isalnum() for letter in word)]
            known = [ids.get(word, vocabulary) for word in words]
            known = [word if word < vocabulary else UNKNOWN for word in known]
            unknown, count = unknown + known.count(UNKNOWN), count + len(known)
            if known:
                table[number, -min(len(known), length) :] = torch.tensor(known[-length:])
        parts[part] = Rows(table, torch.tensor(file[f"y_{part}"]).long())
    return parts, unknown / count


def trained_base(rows: Rows, sizes: Sizes) -> Transformer:
    """The transformer after its training on IMDB."""
    torch.manual_seed(0)
    net = Transformer(sizes.vocabulary, sizes.width, rows.words.shape[1])
    training = explicit(Training, epochs=sizes.base_epochs, batch_size=64, lr=1e-3)
    posterior = provenance.fit(
        explicit(MAP), net, tuple(rows), explicit(Categorical), training=training, progress=False
    )
    folded = posterior.fold(0)
    assert isinstance(folded, Transformer)
    return folded


def methods() -> dict[str, dubito.method.Method]:
    """What is compared."""
    return {
        "MAP": explicit(MAP),
        "MC dropout": explicit(MCDropout),
        "deep ensemble": explicit(DeepEnsemble),
        "KFAC": explicit(Laplace, structure=explicit(KFAC)),
        "INF": explicit(Laplace, structure=explicit(INF, rank=50)),
        "k-tied": explicit(KTied, prior_std=0.3),
        "rank-1": explicit(Rank1),
        "implicit": explicit(Implicit),
        "mean field": explicit(MeanField, prior_std=0.3),
    }


def run(folder: Path, sizes: Sizes, seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    """All figures.

    Args:
        folder: that holds both files.
        sizes: of the run.
        seeds: of adapters, order and noise.
    """
    began = time.process_time()
    reviews, others, ids = imdb(folder, sizes.base_rows)
    parts, unknown = sst2(folder, ids, sizes.vocabulary)
    base = trained_base(reviews, sizes)
    with torch.no_grad():
        right = torch.cat([base(words).argmax(1) for words in others.words[:5000].split(500)])
    training = explicit(Training, epochs=sizes.epochs, batch_size=64, lr=3e-3)
    train = tuple(tensor[: sizes.rows] for tensor in parts["train"])
    figures: dict[str, Any] = {
        "unknown words": unknown,
        "accuracy of the base on IMDB": float((right == others.classes[:5000]).float().mean()),
        "rows": len(train[0]),
        "numbers of the base": sum(p.numel() for p in base.parameters()),
        "numbers of the adapters": sum(p.numel() for p in adapted(base, 0).parameters() if p.requires_grad),
        "methods": {},
    }
    for name, method in methods().items():
        entries = []
        for seed in seeds:
            net, start = adapted(base, seed), time.process_time()
            # Laplace chooses its prior precision by validation rows, as it does by default where there are some.
            more: Any = {"validation": tuple(parts["dev"])} if isinstance(method, Laplace) else {}
            if isinstance(method, DeepEnsemble):
                more = {"start": lambda member, seed=seed: adapted(base, 100 * (seed + 1) + member)}
            posterior = provenance.fit(
                method, net, train, explicit(Categorical), training=training, seed=seed, progress=False, **more
            )
            seconds = time.process_time() - start
            metrics = posterior.evaluate(tuple(parts["test"]))
            with tempfile.TemporaryDirectory() as place:
                posterior.save(path := Path(place) / "p.safetensors")
                size = path.stat().st_size
            shown = {key: round(metrics[key], 4) for key in ("nll", "ece", "accuracy")}
            entries.append({**shown, "bytes": size, "seconds": round(seconds, 1)})
        figures["methods"][name] = entries
        print(name, entries, flush=True)
    return {**figures, "CPU seconds": round(time.process_time() - began)}


def table(figures: dict[str, Any]) -> str:
    """The page's table: means over seeds, with the standard deviation of the NLL."""
    lines = ["| method | NLL | ECE | accuracy | bytes | seconds |", "|---|---|---|---|---|---|"]
    for name, entries in figures["methods"].items():
        mean = {key: float(np.mean([entry[key] for entry in entries])) for key in entries[0]}
        spread = float(np.std([entry["nll"] for entry in entries], ddof=1)) if len(entries) > 1 else 0.0
        lines.append(
            f"| {name} | {mean['nll']:.3f} ± {spread:.3f} | {mean['ece']:.3f} | {mean['accuracy']:.3f} | "
            f"{mean['bytes']:,.0f} | {mean['seconds']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    done = run(Path(sys.argv[1]), Sizes())
    RESULTS.write_text(json.dumps(done, indent=1) + "\n")
    print(table(done))

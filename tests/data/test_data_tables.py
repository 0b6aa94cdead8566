"""The six tables of the folder `tabular`, on made-up files of their form."""

import gzip
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dubito.data import load
from dubito.data.catalogue import ENTRIES

ROWS = 40


@pytest.fixture
def stored(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts content in the place of a set's file, and its size, checksum and shape into the catalogue."""

    def put(name: str, content: bytes, shape: tuple[int, int]) -> None:
        (form,) = ENTRIES[name].forms
        (file,) = form.files
        path = folder / file.path
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        file = replace(file, size=len(content), sha256=hashlib.sha256(content).hexdigest())
        form = replace(form, files=(file,), shapes={"train": shape})
        monkeypatch.setitem(ENTRIES, name, replace(ENTRIES[name], forms=(form,)))

    return put


def archive(path: Path, **arrays: np.ndarray) -> bytes:
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    return path.read_bytes()


@pytest.mark.parametrize("name", ["elevators", "pol"])
def test_archives_of_reals(name, stored, tmp_path):
    x, y = np.random.default_rng(0).normal(size=(ROWS, 3)), np.arange(ROWS) * 7.0
    content = archive(
        tmp_path / "t.npz", X=x, y=y, feature_names=np.array(["x0", "x1", "x2"]), test_fold=np.zeros(ROWS, np.uint8)
    )
    stored(name, content, (ROWS, 3))
    data = load(name, 9, standardise=False, dtype=torch.float64)
    assert (data.task, data.num_splits, data.num_outputs) == ("regression", 10, 1)
    assert (len(data.train.targets), len(data.test.targets)) == (36, 4)
    assert data.feature_names == ("x0", "x1", "x2")
    rows = (torch.cat([data.train.targets, data.test.targets])[:, 0] / 7).long()
    assert sorted(rows.tolist()) == list(range(ROWS))
    torch.testing.assert_close(
        torch.cat([data.train.inputs, data.test.inputs]), torch.as_tensor(x)[rows], rtol=0, atol=0
    )


def test_the_class_that_satimage_leaves_out_leaves_no_gap(stored, tmp_path):
    labels = np.array([1, 2, 3, 4, 5, 7], np.uint8)[np.arange(ROWS) % 6]
    x = labels[:, None] * np.ones((1, 4), np.uint8)
    names = np.array([f"pixel0_band{band}" for band in range(4)])
    stored("satimage", archive(tmp_path / "t.npz", X=x, y=labels, feature_names=names), (ROWS, 4))
    data = load("satimage", standardise=False)
    assert (len(data.train.targets), data.num_outputs, len(data.class_names)) == (32, 6, 6)
    classes = torch.where(data.train.inputs[:, 0] == 7, 5, data.train.inputs[:, 0] - 1)
    assert torch.equal(data.train.targets, classes.long())
    assert data.class_names[5] == "very damp grey soil"


@pytest.mark.parametrize(
    ("name", "target", "words"), [("adult", "income", ("<=50K", ">50K")), ("german-credit", "credit", ("bad", "good"))]
)
def test_texts_of_classes_have_categories_and_gaps(name, target, words, stored):
    lines = [f"age,job,{target}"]
    jobs = ["cook", "", "smith"]
    lines += [f"{'' if row == 5 else row},{jobs[row % 3]},{words[row % 2]}" for row in range(ROWS)]
    stored(name, gzip.compress("\n".join(lines).encode()), (ROWS, 5))
    data = load(name, 3, standardise=False, dtype=torch.float64)
    assert (data.task, data.class_names, len(data.test.targets)) == ("binary", words, 8)
    assert data.feature_names == ("age", "age is missing", "job=cook", "job=smith", "job is missing")
    ages, missing = data.train.inputs[:, 0], data.train.inputs[:, 1] == 1
    assert missing.sum() == 1  # row 5 is among the training rows of split 3
    # Filled from the training rows alone: the test rows would move this median
    assert ages[missing].item() == np.median(ages[~missing])
    assert np.median(ages[~missing]) != np.median([row for row in range(ROWS) if row != 5])
    assert torch.equal(data.train.targets[~missing], ages[~missing].long() % 2)
    assert torch.equal(data.train.inputs[~missing, 2], (ages[~missing] % 3 == 0).double())


def test_the_codes_of_ames_are_names(stored):
    lines = ["area,MS.SubClass,price"]
    lines += [f"{100 + row},{(20, 60, 120)[row % 3]},{1000 * row + 1e5:g}" for row in range(ROWS)]
    stored("ames", gzip.compress("\n".join(lines).encode()), (ROWS, 4))
    data = load("ames", dtype=torch.float64)
    levels = tuple(f"MS.SubClass=code {code}" for code in (120, 20, 60))
    assert data.feature_names == ("area", *levels)
    assert (data.task, len(data.train.targets)) == ("regression", 36)
    assert data.target_scaling is not None
    area = data.train.inputs[:, 0] * data.input_scaling.scale[0] + data.input_scaling.shift[0]
    torch.testing.assert_close(
        1000 * (area - 100) + 1e5, data.train.targets[:, 0] * data.target_scaling.scale + data.target_scaling.shift
    )

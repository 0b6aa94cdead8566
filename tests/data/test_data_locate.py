import gzip
import hashlib
import os
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dubito.data import listing, load, locate
from dubito.data.catalogue import ENTRIES
from dubito.data.readers import idx_grey, npz_grey, npz_table, text_table
from dubito.data.registry import Entry, File, StoredForm
from dubito.errors import DataError, StorageError, UnknownNameError

X = np.arange(60.0).reshape(20, 3)
Y = np.arange(20.0) % 7


def write_table(folder: Path, x=X, y=Y) -> bytes:
    path = folder / "tables" / "tiny.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez(path, X=x, y=y)
    return path.read_bytes()


def entry_of(content: bytes, **options) -> Entry:
    form = StoredForm(
        files=(File(path="tables/tiny.npz", size=len(content), sha256=hashlib.sha256(content).hexdigest()),),
        read=partial(npz_table, feature_names=("a", "b", "c")),
        shapes={"train": (20, 3)},
    )
    settings = {"task": "regression", "licence": "own", "source": "here", "target_name": "y", "splits": 4}
    return Entry(**(settings | {"forms": (form,)} | options))


@pytest.fixture
def tiny(folder, monkeypatch):
    monkeypatch.setitem(ENTRIES, "tiny", entry_of(write_table(folder)))
    return folder / "tables" / "tiny.npz"


def test_files_are_found_in_the_path_list(tiny):
    data = load("tiny", download=False)
    assert len(data.train.targets) == 16
    assert data.feature_names == ("a", "b", "c")


def test_files_are_found_in_the_cache(tiny):
    place = locate.cache_folder() / "tables" / "tiny.npz"
    place.parent.mkdir(parents=True)
    tiny.rename(place)
    assert len(load("tiny").train.targets) == 16


def test_the_path_list_comes_before_the_cache(tiny):
    place = locate.cache_folder() / "tables" / "tiny.npz"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"rubbish")
    assert len(load("tiny").train.targets) == 16


def test_an_absent_set_says_where_what_and_where_to(tiny, monkeypatch):
    tiny.unlink()
    with pytest.raises(DataError) as caught:
        load("tiny")
    message = str(caught.value)
    for folder in os.environ["DUBITO_DATA"].split(os.pathsep):
        assert folder in message
    assert f"{locate.cache_folder()} (no such folder)" in message
    assert "No publisher offers it" in message
    assert str(locate.cache_folder() / "tables" / "tiny.npz") in message
    assert ENTRIES["tiny"].forms[0].files[0].sha256 in message


def test_wrong_size_is_refused(tiny):
    tiny.write_bytes(tiny.read_bytes() + b"\0")
    with pytest.raises(StorageError, match=r"tiny.npz should have \d+ bytes, got \d+"):
        load("tiny")


def test_wrong_checksum_is_refused_even_after_a_right_one(tiny):
    load("tiny")
    content = bytearray(tiny.read_bytes())
    content[100] ^= 1
    tiny.write_bytes(content)
    os.utime(tiny, ns=(1, 1))
    with pytest.raises(StorageError, match="should have sha256"):
        load("tiny")


def test_a_file_is_hashed_once(tiny, monkeypatch):
    calls = []
    real = locate.sha256_of
    monkeypatch.setattr(locate, "sha256_of", lambda path: calls.append(path) or real(path))
    for split in range(3):
        load("tiny", split)
    assert len(calls) == 1


@pytest.mark.parametrize(("x", "y"), [(X[:19], Y), (X[:, :2], Y), (X, Y[:19])])
def test_wrong_shapes_are_refused(folder, monkeypatch, x, y):
    monkeypatch.setitem(ENTRIES, "tiny", entry_of(write_table(folder, x, y)))
    with pytest.raises(StorageError, match=r"should hold 'tiny', inputs train \[20, 3\]"):
        load("tiny")


def test_a_file_that_cannot_be_read_is_refused(folder, monkeypatch):
    (folder / "tables").mkdir()
    (folder / "tables" / "tiny.npz").write_bytes(b"PK rubbish")
    monkeypatch.setitem(ENTRIES, "tiny", entry_of(b"PK rubbish"))
    with pytest.raises(StorageError, match="reading it failed"):
        load("tiny")


def test_a_missing_array_is_refused(folder, monkeypatch):
    write_table(folder)
    path = folder / "tables" / "tiny.npz"
    np.savez(path, X=X)
    monkeypatch.setitem(ENTRIES, "tiny", entry_of(path.read_bytes()))
    with pytest.raises(StorageError, match="KeyError: 'y"):
        load("tiny")


def text_entry(content: str, **options) -> Entry:
    digest = hashlib.sha256(X.tobytes() + Y.tobytes()).hexdigest()
    form = StoredForm(
        files=(File(path="tiny.txt", url="https://publisher.example/data.txt"),),
        read=partial(text_table, columns=range(4)),
        shapes={"train": (20, 3)},
        content=content or digest,
    )
    return entry_of(b"", forms=(form,), **options)


def test_a_text_fetched_by_hand_is_checked_by_its_numbers(folder, monkeypatch):
    monkeypatch.setitem(ENTRIES, "tiny", text_entry(""))
    with pytest.raises(DataError, match=r"https://publisher.example/data.txt\n +-> .*tiny.txt"):
        load("tiny")  # without a checksum of the file itself it is never downloaded
    np.savetxt(folder / "tiny.txt", np.column_stack([X, Y]))
    assert len(load("tiny").train.targets) == 16
    changed = X.copy()
    changed[3, 1] += 1
    np.savetxt(folder / "tiny.txt", np.column_stack([changed, Y]))
    with pytest.raises(StorageError, match="whose numbers have sha256"):
        load("tiny")


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def letters(monkeypatch):
    """A set with a fuller form that can be downloaded and a prepared form with the test part alone."""
    stream = np.random.default_rng(0)
    images, classes = stream.integers(0, 256, (12, 4, 4)), np.arange(12) % 2
    contents = [idx_bytes(part) for part in (images[:8], classes[:8], images[8:], classes[8:])]
    files = tuple(
        File(
            path=f"letters/{number}.gz",
            size=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            url=f"https://publisher.example/{number}.gz",
        )
        for number, content in enumerate(contents)
    )
    published = StoredForm(files=files, read=idx_grey, shapes={"train": (8, 1, 4, 4), "test": (4, 1, 4, 4)})
    entry = Entry(
        task="classification",
        kind="image",
        licence="own",
        source="here",
        target_name="letter",
        class_names=("a", "b"),
        tail=3,
        forms=(published,),
    )
    monkeypatch.setitem(ENTRIES, "letters", entry)
    return contents


def test_missing_files_are_downloaded_into_the_cache(folder, letters, monkeypatch):
    asked = []

    def fetch(url, target, *, size, sha256):
        asked.append(url)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(letters[int(Path(url).stem)])

    monkeypatch.setattr(locate, "fetch", fetch)
    with pytest.raises(DataError, match="is not here"):
        load("letters", download=False)
    (folder / "letters").mkdir()
    (folder / "letters" / "1.gz").write_bytes(letters[1])  # one of them is at hand
    data = load("letters")
    assert asked == [f"https://publisher.example/{number}.gz" for number in (0, 2, 3)]
    assert data.validation is not None
    assert [len(part.targets) for part in (data.train, data.validation, data.test)] == [5, 3, 4]
    load("letters")
    assert len(asked) == 3


def test_offline_and_absent_is_one_error(letters, monkeypatch):
    def fetch(url, target, **facts):
        raise ConnectionRefusedError("no network")

    monkeypatch.setattr(locate, "fetch", fetch)
    with pytest.raises(DataError) as caught:
        load("letters")
    message = str(caught.value)
    for number in range(4):
        assert f"https://publisher.example/{number}.gz" in message
        assert str(locate.cache_folder() / "letters" / f"{number}.gz") in message
    assert "Downloading it failed: no network" in message


def test_a_test_part_alone_is_not_scaled_by_itself(folder, monkeypatch):
    images, classes = np.full((4, 4, 4), 255, np.uint8), np.array([0, 1, 0, 1], np.uint8)
    path = folder / "foreign.npz"
    np.savez(path, x_test=images, y_test=classes)
    content = path.read_bytes()
    form = StoredForm(
        files=(File(path="foreign.npz", size=len(content), sha256=hashlib.sha256(content).hexdigest()),),
        read=npz_grey,
        shapes={"test": (4, 1, 4, 4)},
    )
    entry = entry_of(content, forms=(form,), task="classification", kind="image", class_names=("a", "b"), tail=2)
    monkeypatch.setitem(ENTRIES, "foreign", entry)
    data = load("foreign")
    assert data.validation is None
    assert data.train.inputs.shape == (0, 1, 4, 4)
    assert (data.test.inputs == 1).all()


def test_listing(tiny):
    rows = {row.name: row for row in listing()}
    assert list(rows) == list(ENTRIES)
    assert (rows["tiny"].task, rows["tiny"].rows, rows["tiny"].licence) == ("regression", 20, "own")
    assert rows["tiny"].present
    assert not rows["mnist"].present
    assert rows["mnist"].rows == 70_000
    assert rows["sinc"].present
    assert rows["digits"].present
    tiny.unlink()
    assert not {row.name: row for row in listing()}["tiny"].present


def test_every_name_of_the_catalogue_is_described():
    uci = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine-red", "yacht")
    expected = {
        *("digits", "breast-cancer", "wine", "diabetes"),
        *("sinc", "sines-trend", "two-moons", "cubic-inf", "cubic-implicit"),
        *(f"uci/{name}" for name in uci),
        *("spambase", "magic", "diabetes-health"),
        *("satimage", "adult", "german-credit", "elevators", "pol", "ames"),
        *("mnist", "fashion-mnist", "kmnist", "notmnist", "cifar10", "cifar100", "imdb", "physionet2012"),
    }
    assert set(ENTRIES) == expected
    for name, entry in ENTRIES.items():
        assert entry.licence and entry.source and entry.target_name
        assert (entry.build is None) == bool(entry.forms)
        assert entry.splits == {"uci/protein": 5}.get(name, 20 if name.startswith("uci/") else entry.splits)
        for form in entry.forms:
            assert form.rows > 0
            # Nothing is ever used unchecked, and whatever is absent can be obtained or is described
            assert form.content is not None or all(file.size and len(file.sha256 or "") == 64 for file in form.files)


@pytest.mark.parametrize(("name", "near"), [("mnits", "mnist"), ("boston", "uci/boston"), ("MNIST", "mnist")])
def test_unknown_names_name_the_nearest(name, near):
    with pytest.raises(UnknownNameError, match=f"did you mean '{near}'"):
        load(name)

import sys
from dataclasses import asdict

import numpy as np
import pandas
import pytest
import torch

from dubito.data import load
from dubito.data.columns import described, differences, encoded, from_json
from dubito.data.tabular import detected
from dubito.errors import ConfigError, DataError, StorageError, UnknownNameError

STREAM = np.random.default_rng(0)


def write(path, text):
    path.write_text(text)
    return path


@pytest.fixture
def table(tmp_path):
    frame = pandas.DataFrame(
        {"a": STREAM.normal(5, 3, 40), "b": STREAM.integers(0, 9, 40), "flag": STREAM.random(40) < 0.5}
    )
    frame["y"] = 2 * frame.a - frame.b + 0.5
    path = tmp_path / "own.csv"
    frame.to_csv(path, index=False)
    return path, frame


def test_a_csv_becomes_parts(table):
    path, frame = table
    data = load(path, target="y", dtype=torch.float64)
    assert data.task == "regression"
    assert data.task_reason == "'y' holds fractions"
    assert data.feature_names == ("a", "b", "flag")
    assert (len(data.train.targets), len(data.test.targets)) == (32, 8)
    rows = np.random.RandomState(1).permutation(40)
    expected = frame[["a", "b", "flag"]].to_numpy(float)[rows]
    mean, std = expected[:32].mean(0), expected[:32].std(0)
    np.testing.assert_allclose(data.train.inputs, (expected[:32] - mean) / std, atol=1e-12)
    np.testing.assert_allclose(data.test.inputs, (expected[32:] - mean) / std, atol=1e-12)
    assert data.target_scaling is not None
    original = data.target_scaling.undo(data.test.targets)[:, 0]
    np.testing.assert_allclose(original, frame["y"].to_numpy()[rows[32:]], rtol=1e-12)


def test_missing_target_columns_name_the_nearest(table):
    with pytest.raises(UnknownNameError, match=r"own.csv: 'flg', did you mean 'flag'\? Known: a, b, flag, y"):
        load(table[0], target="flg")
    with pytest.raises(ConfigError, match="needs target="):
        load(table[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,y\n1,2,3\n4,x,6\n7,8,9\n", r"column 'b' of .*own.csv must hold finite numbers, got 'x' in row 2"),
        ("a,b,y\n1,2,3\n,5,6\n4,?,6\n7,8,9\n", r"column 'b' .*, got '\?' in row 3 .* leave it empty"),
        ("a,b,y\n1,2,3\n4,5,6\ninf,8,9\n", r"column 'a' .*, got inf in row 3"),
        ("a,b,y\n1,2,3\n4,5,x\n7,8,9\n", r"column 'y' .* finite numbers, got 'x' in row 2"),
        ("a,b,y\n1,2,u\n4,5,\n7,8,v\n", r"'y' is missing in 1 of the 3 rows of .*; fill it, or choose"),
        ("a,y\n,1\n,2\n,3\n", "a column to learn from beside the target: a: empty, left out"),
        ("a,b,y\n1,2,3\n4,5,6\n", "at least 3 rows"),
        ("y\n1\n2\n3\n", "columns beside the target"),
    ],
)
def test_what_is_not_a_number_is_named_by_row_and_column(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        load(write(tmp_path / "own.csv", text), target="y")


def test_files_that_are_no_tables_are_refused(tmp_path):
    with pytest.raises(StorageError, match=r"should be a table"):
        load(write(tmp_path / "empty.csv", ""), target="y")
    with pytest.raises(StorageError, match="npz archive of plain arrays"):
        load(write(tmp_path / "own.npz", "rubbish"), target="y")
    with pytest.raises(DataError, match="there is no file"):
        load(tmp_path / "absent.csv", target="y")
    with pytest.raises(DataError, match=r"there is no file .*table.dat, nor a data set of that name; tables end in"):
        load(tmp_path / "table.dat", target="y")


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (np.repeat([0.0, 1.0], 5), "binary"),
        (np.repeat([-1.0, 4.0], 5), "binary"),
        (np.repeat([0.0, 1.0, 2.0], 5), "classification"),
        (np.array([0.0, 1.0, 2.0] * 4), "regression"),
        (np.repeat(np.arange(20.0), 5), "classification"),
        (np.repeat(np.arange(21.0), 5), "regression"),
        (np.repeat([0.0, 0.5], 50), "regression"),
        (np.array(["no", "yes", "no"]), "binary"),
        (np.array(["a", "b", "c"]), "classification"),
    ],
)
def test_the_task_is_detected_by_rule(values, task):
    found, reason = detected(values, "y")
    assert found == task
    assert reason.startswith("'y' holds ")


def csv_of(path, targets):
    pandas.DataFrame({"x": np.arange(len(targets)), "y": targets}).to_csv(path, index=False)
    return path


def test_classes_are_numbered_in_sorted_order(tmp_path):
    path = csv_of(tmp_path / "own.csv", ["wolf", "cat", "dog", "cat", "dog"] * 3)
    data = load(path, target="y", dtype=torch.float64, standardise=False)
    assert data.class_names == ("cat", "dog", "wolf")
    assert (data.task, data.num_outputs, data.num_classes) == ("classification", 3, 3)
    kinds = np.array([2, 0, 1, 0, 1] * 3)
    assert data.train.targets.dtype == torch.int64
    assert data.train.targets.tolist() == kinds[data.train.inputs[:, 0].long()].tolist()
    path = csv_of(tmp_path / "own.csv", [7, 3, 3, 7, 7] * 3)
    data = load(path, target="y")
    assert (data.task, data.class_names, data.num_outputs) == ("binary", ("3", "7"), 1)
    assert data.target_scaling is None


def test_a_task_asked_for_wins_and_is_checked(tmp_path):
    path = csv_of(tmp_path / "own.csv", [1, 2, 3] * 5)
    data = load(path, target="y", task="regression")
    assert (data.task, data.task_reason) == ("regression", "task='regression' was asked for")
    assert data.train.targets.shape == (12, 1)
    with pytest.raises(DataError, match="must hold 2 classes for binary, got 3"):
        load(path, target="y", task="binary")
    with pytest.raises(UnknownNameError, match="did you mean 'regression'"):
        load(path, target="y", task="regresion")
    with pytest.raises(DataError, match=r"must hold whole numbers or words for classification, got 1.5 in row 2"):
        load(csv_of(path, [1, 1.5, 2, 2]), target="y", task="classification")
    with pytest.raises(DataError, match="must hold numbers for regression, got 'u'"):
        load(csv_of(path, ["u", "v", "w"]), target="y", task="regression")


def test_times_are_not_taken_for_numbers(monkeypatch, tmp_path):
    frame = pandas.DataFrame({"when": pandas.to_datetime(["2020-01-01", "2020-01-02"] * 2), "y": [1.5, 2, 3, 4]})
    monkeypatch.setattr(pandas, "read_parquet", lambda path: frame)
    data = load(write(tmp_path / "own.parquet", ""), target="y")
    assert data.feature_names[0] == "when: year" and data.columns[0].levels == ("year", "weekday")


def mixed(rows=60):
    """Numbers, words and names, some missing, and a target that lacks in one row."""
    frame = pandas.DataFrame(
        {
            "area": STREAM.normal(100, 20, rows),
            "city": STREAM.choice(["Rome", "Oslo", "Lima"], rows),
            "id": [f"house {number}" for number in range(rows)],
        }
    )
    frame["price"] = frame.area * 2 + 0.25
    frame.loc[[3, 7], "area"] = np.nan
    frame.loc[11, "city"] = np.nan
    frame.loc[20, "price"] = np.nan
    return frame


def test_categories_and_missing_values_become_columns(tmp_path):
    frame = mixed()
    frame.to_csv(tmp_path / "own.csv", index=False)
    data = load(tmp_path / "own.csv", target="price", dtype=torch.float64, standardise=False)
    assert data.feature_names == (
        "area", "area is missing", "city=Lima", "city=Oslo", "city=Rome", "city is missing",
    )  # fmt: skip
    assert data.notes == (
        "price: 1 of 60 rows have no target and are left out",
        "area: 2 of 59 values missing, filled with the training rows' median and flagged",
        "city: 1 of 59 values missing, flagged",
        "id: 59 different words in 59 rows, left out as a name or text",
    )
    kept = frame.dropna(subset="price").reset_index(drop=True)
    order = np.random.RandomState(1).permutation(59)
    median = kept.area[order[:47]].median()
    assert data.fill is not None and float(data.fill[0]) == median  # of the training rows alone
    together = torch.cat([data.train.inputs, data.test.inputs])
    for position, row in enumerate(order):
        values = kept.iloc[row]
        lacks = bool(np.isnan(values.area))
        expected = [median if lacks else values.area, float(lacks)]
        expected += [float(values.city == city) for city in ("Lima", "Oslo", "Rome")]
        assert together[position].tolist() == [*expected, float(not isinstance(values.city, str))]


def test_rare_words_share_a_column(tmp_path):
    words = [f"w{number:02}" for number in range(60)] * 3 + ["often"] * 20
    pandas.DataFrame({"word": words, "y": np.arange(200) * 0.5}).to_csv(tmp_path / "own.csv", index=False)
    data = load(tmp_path / "own.csv", target="y", standardise=False)
    assert len(data.feature_names) == 51 and data.feature_names[-1] == "word=(other)"
    assert data.notes == ("word: 61 different words, of which the 50 most frequent count",)
    assert torch.cat([data.train.inputs, data.test.inputs]).sum(1).eq(1).all()


def test_what_new_rows_have_otherwise_is_named():
    frame = mixed().drop(columns="price")
    columns, _ = described(frame, "old")
    new = frame.assign(city=["Paris"] + ["Rome"] * 59, colour="red").drop(columns="id")
    assert differences(new, columns, "new") == [
        "not used, for training did not have it: colour",
        "city: 'Paris' did not occur in training",
    ]
    assert encoded(new, columns, "new")[0, 2:].tolist() == [0.0, 0.0, 0.0, 0.0]
    plain, _ = described(frame[["area"]].dropna(), "old")
    assert differences(frame, plain, "new")[-1] == "area: 2 values missing, where training had all"
    with pytest.raises(DataError, match="lacks columns that training had: city; it has town instead"):
        differences(frame.rename(columns={"city": "town"}), columns, "new")
    assert from_json([asdict(column) for column in columns]) == columns


def test_parquet_files(table, tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "own.parquet"
    table[1].to_parquet(path)
    one, other = load(path, target="y"), load(table[0], target="y")
    assert one.train.inputs.equal(other.train.inputs)
    assert one.train.targets.equal(other.train.targets)


@pytest.mark.parametrize(("module", "suffix"), [("pandas", "csv"), ("pyarrow", "parquet")])
def test_missing_packages_are_named(monkeypatch, tmp_path, module, suffix):
    monkeypatch.setitem(sys.modules, module, None)
    if module == "pyarrow":
        monkeypatch.setitem(sys.modules, "fastparquet", None)
    with pytest.raises(ConfigError, match=rf"needs {module}, which is not installed: pip install 'dubito\[tabular\]'"):
        load(write(tmp_path / f"own.{suffix}", "a,y\n1,2\n"), target="y")


def test_npz_of_one_array_keeps_its_shape(tmp_path):
    images = STREAM.random((10, 2, 3, 3))
    np.savez(tmp_path / "own.npz", images=images, y=np.arange(10) * 0.5)
    data = load(tmp_path / "own.npz", target="y", dtype=torch.float64)
    rows = np.random.RandomState(1).permutation(10)[:8]
    # by channel, as the named sets of images
    mean, std = (getattr(images[rows], name)((0, 2, 3))[:, None, None] for name in ("mean", "std"))
    np.testing.assert_allclose(data.train.inputs, (images[rows] - mean) / std, atol=1e-12)
    assert data.notes == ()


def test_images_of_whole_numbers_are_bytes_and_doubtful_shapes_are_named(tmp_path):
    images = STREAM.integers(0, 256, (10, 1, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", images=images, y=np.arange(10) * 0.5)
    data = load(tmp_path / "own.npz", target="y", dtype=torch.float64)
    rows = np.random.RandomState(1).permutation(10)[:8]
    np.testing.assert_allclose(data.input_scaling.undo(data.train.inputs), images[rows] / 255, atol=1e-12)
    assert data.notes == ("images: whole numbers, taken for the bytes of images, from 0 to 255",)
    for shape, told in (
        ((10, 5, 4), "taken for series of 5 steps with 4 values each; grey images are [N, 1, height, width]"),
        ((10, 4, 4, 3), "taken for images of 4 channels; where channels come last, move them"),
    ):
        np.savez(tmp_path / "own.npz", x=STREAM.random(shape), y=np.arange(10) * 0.5)
        (note,) = load(tmp_path / "own.npz", target="y").notes
        assert told in note


def test_several_real_targets(tmp_path):
    frame = pandas.DataFrame(STREAM.normal(size=(20, 4)) * [1, 1, 1, 50], columns=["a", "b", "u", "v w"])
    frame.loc[3, "u"] = np.nan
    frame.to_csv(tmp_path / "own.csv", index=False)
    data = load(tmp_path / "own.csv", target="u, v w", dtype=torch.float64)
    assert (data.task, data.num_outputs, data.target_name) == ("regression", 2, "u, v w")
    assert data.task_reason == "'u, v w' holds 2 targets"
    assert data.notes == ("u, v w: 1 of 20 rows have no target and are left out",)
    assert data.train.targets.shape == (15, 2) and data.target_scaling.scale[1] > 10
    rows = np.random.RandomState(1).permutation(19)[:15]
    np.testing.assert_allclose(
        data.target_scaling.undo(data.train.targets), frame.drop(index=3)[["u", "v w"]].to_numpy()[rows]
    )
    np.savez(tmp_path / "own.npz", x=frame[["a", "b"]], y=frame[["u", "v w"]].fillna(0))
    data = load(tmp_path / "own.npz", target="y", standardise=False)
    assert data.num_outputs == 2 and data.test.targets.shape == (4, 2)
    assert data.target_scaling.scale.tolist() == [1, 1]
    with pytest.raises(DataError, match=r"classification has one target, but 'u,v w' of .* holds 2"):
        load(tmp_path / "own.csv", target="u,v w", task="classification")
    with pytest.raises(UnknownNameError, match=r"own.csv: 'v'. Known: a, b, u, v w"):
        load(tmp_path / "own.csv", target="u,v")
    with pytest.raises(DataError, match="named once"):
        load(tmp_path / "own.csv", target="u,u")


def test_targets_must_vary(tmp_path):
    for values in (["yes"] * 5, [2.5] * 5, [1] * 5):
        with pytest.raises(DataError, match="must vary, but all 5 rows hold the same; choose another target"):
            load(csv_of(tmp_path / "own.csv", values), target="y")


def test_columns_of_one_name_are_told(tmp_path):
    text = "a,a,a.1,y\n" + "".join(f"{i},{i % 3},{i % 2},{i / 2}\n" for i in range(9))
    data = load(write(tmp_path / "own.csv", text), target="y")
    assert len(set(data.feature_names)) == 3
    assert data.notes == ("a: several columns have this name; the others are called a.1 and so on",)
    with pytest.raises(DataError, match="several columns called 'y', which is the target; rename the others"):
        load(write(tmp_path / "own.csv", text.replace("a.1", "y")), target="y")


def test_npz_of_several_arrays_joins_columns(tmp_path):
    np.savez(tmp_path / "own.npz", a=np.arange(5), b=np.arange(10).reshape(5, 2), y=np.array(list("uvuvu")))
    data = load(tmp_path / "own.npz", target="y", standardise=False)
    assert data.feature_names == ("a", "b[0]", "b[1]")
    assert data.class_names == ("u", "v")
    assert sorted(data.train.inputs.tolist() + data.test.inputs.tolist()) == [
        [float(i), 2.0 * i, 2.0 * i + 1] for i in range(5)
    ]


def test_npz_arrays_may_hold_words_and_gaps(tmp_path):
    a = np.array([[1.0, 2.0], [3.0, np.nan]] * 3)
    np.savez(tmp_path / "own.npz", a=a, b=np.array(list("uvuvuv")), y=np.arange(6) * 0.5)
    data = load(tmp_path / "own.npz", target="y", standardise=False)
    assert data.feature_names == ("a[0]", "a[1]", "a[1] is missing", "b=u", "b=v")
    assert sorted(set(map(tuple, data.train.inputs.tolist()))) == [(1, 2, 0, 1, 0), (3, 2, 1, 0, 1)]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.arange(4), "y": np.arange(5)}, r"array 'a' .* one row for each of the 5 targets.*\[4\]"),
        ({"a": np.zeros((5, 2, 2)), "b": np.zeros(5), "y": np.arange(5)}, "one or two axes"),
        ({"a": np.array([[[1, 2], [3, np.nan]]] * 3), "y": np.arange(3)}, r"got nan in row 1, position \[1, 1\]"),
        ({"a": np.arange(5), "y": np.zeros((5, 2, 2))}, r"must be of shape \[N\] or \[N, targets\], got \[5, 2, 2\]"),
        ({"y": np.arange(5)}, "arrays beside the target"),
    ],
)
def test_npz_arrays_that_do_not_fit_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load(tmp_path / "own.npz", target="y")
    with pytest.raises(UnknownNameError, match="target array of"):
        load(tmp_path / "own.npz", target="z")

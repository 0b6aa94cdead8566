import numpy as np
import pytest
import torch
from sklearn import datasets

from dubito.data import Part, Scaling, load
from dubito.data.assemble import channel_statistics, column_statistics
from dubito.data.catalogue import ENTRIES
from dubito.data.registry import Entry, Raw
from dubito.errors import ConfigError, StorageError

STREAM = np.random.default_rng(0)


def registered(monkeypatch, raw: Raw, **options):
    settings = {"task": "regression", "licence": "own", "source": "here", "target_name": "y", "splits": 3}
    monkeypatch.setitem(ENTRIES, "made", Entry(**(settings | {"build": lambda split, num_data: raw} | options)))


@pytest.mark.parametrize(
    ("name", "loader", "task", "outputs"),
    [
        ("digits", datasets.load_digits, "classification", 10),
        ("breast-cancer", datasets.load_breast_cancer, "binary", 1),
        ("wine", datasets.load_wine, "classification", 3),
    ],
)
def test_class_sets_of_scikit_learn(name, loader, task, outputs):
    data, bunch = load(name, 2, dtype=torch.float64), loader()
    assert (data.task, data.num_outputs) == (task, outputs)
    assert data.class_names == tuple(map(str, bunch.target_names))
    assert data.feature_names == tuple(bunch.feature_names)
    assert data.input_scaling is not None
    stream = np.random.RandomState(1)
    rows = [stream.permutation(len(bunch.target)) for _ in range(3)][2]
    count = round(0.8 * len(rows))
    for part, numbers in ((data.train, rows[:count]), (data.test, rows[count:])):
        np.testing.assert_allclose(data.input_scaling.undo(part.inputs), bunch.data[numbers], atol=1e-9)
        assert part.targets.tolist() == bunch.target[numbers].tolist()


def test_diabetes_is_not_scaled_by_its_test_rows():
    data, bunch = load("diabetes", dtype=torch.float64), datasets.load_diabetes(scaled=False)
    rows = np.random.RandomState(1).permutation(442)[:354]
    assert data.input_scaling is not None and data.target_scaling is not None
    np.testing.assert_allclose(data.input_scaling.shift, bunch.data[rows].mean(0))
    np.testing.assert_allclose(data.input_scaling.scale, bunch.data[rows].std(0))
    np.testing.assert_allclose(data.target_scaling.shift, [bunch.target[rows].mean()])
    np.testing.assert_allclose(data.target_scaling.undo(data.train.targets)[:, 0], bunch.target[rows])


def test_parts_are_pairs():
    train = load("wine").train
    assert isinstance(train, tuple)
    assert isinstance(train, Part)
    inputs, targets = train
    assert inputs is train.inputs and targets is train.targets
    assert inputs.shape == (len(targets), 13)


@pytest.mark.parametrize("value", [288.0, 0.1, -1e-12, 1e9 + 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_columns_are_safe(monkeypatch, value, dtype):
    inputs = STREAM.normal(size=(50, 3))
    inputs[:, 1] = value  # 0.1 · 50 / 50 is not 0.1: a deviation of 1e-17 must not become a scale
    registered(monkeypatch, Raw(train=(inputs, STREAM.normal(size=50))))
    data = load("made", dtype=dtype)
    assert (data.train.inputs[:, 1] == 0).all()
    assert (data.test.inputs[:, 1] == 0).all()
    assert data.input_scaling is not None
    assert data.input_scaling.scale[1] == 1


def test_a_column_that_is_constant_in_training_alone_is_safe(monkeypatch):
    inputs = np.zeros((10, 2))
    inputs[:, 1] = range(10)
    test_row = np.random.RandomState(1).permutation(10)[-1]
    inputs[test_row, 0] = 3.0
    registered(monkeypatch, Raw(train=(inputs, np.arange(10.0))))
    data = load("made")
    assert (data.train.inputs[:, 0] == 0).all()
    assert data.test.inputs[-1, 0] == 3


def test_large_columns_keep_their_small_differences(monkeypatch):
    inputs = 1e7 + np.arange(20.0)[:, None] / 16
    registered(monkeypatch, Raw(train=(inputs, np.arange(20.0))))
    data = load("made", dtype=torch.float32)
    rows = np.random.RandomState(1).permutation(20)[:16]
    expected = (inputs[rows] - inputs[rows].mean(0)) / inputs[rows].std(0)
    np.testing.assert_allclose(data.train.inputs, expected, rtol=1e-5, atol=1e-6)


def test_statistics_know_the_training_rows_alone(monkeypatch):
    inputs, targets = STREAM.normal(3, 2, (100, 2)), STREAM.normal(5, 4, 100)
    registered(monkeypatch, Raw(train=(inputs, targets)))
    data = load("made", validation=0.25, dtype=torch.float64)
    assert data.validation is not None and data.input_scaling is not None and data.target_scaling is not None
    assert [len(part.targets) for part in (data.train, data.validation, data.test)] == [60, 20, 20]
    for values in data.train:
        torch.testing.assert_close(values.mean(0), torch.zeros_like(values[0]), atol=1e-12, rtol=0)
        torch.testing.assert_close(values.std(0, correction=0), torch.ones_like(values[0]))
    together = torch.cat([data.train.targets, data.validation.targets, data.test.targets])
    np.testing.assert_allclose(np.sort(data.target_scaling.undo(together)[:, 0]), np.sort(targets))


def test_images_are_scaled_by_channel_and_divided_at_the_tail(monkeypatch):
    images = STREAM.integers(0, 256, (30, 2, 4, 5), dtype=np.uint8)
    images[:, 1] //= 2
    classes = STREAM.integers(0, 3, 30).astype(np.uint8)
    raw = Raw(train=(images[:24], classes[:24]), test=(images[24:], classes[24:]))
    options = {"task": "classification", "kind": "image", "class_names": ("a", "b", "c"), "tail": 6, "splits": 1}
    registered(monkeypatch, raw, **options)
    data = load("made", dtype=torch.float64)
    assert data.validation is not None
    unit = images / 255.0
    mean, std = unit[:18].mean((0, 2, 3), keepdims=True), unit[:18].std((0, 2, 3), keepdims=True)
    for part, rows in ((data.train, slice(18)), (data.validation, slice(18, 24)), (data.test, slice(24, None))):
        np.testing.assert_allclose(part.inputs, (unit[rows] - mean) / std, atol=1e-12)
        assert part.targets.tolist() == classes[rows].tolist()
        assert part.targets.dtype == torch.int64
    assert load("made", validation=0).validation is None
    assert len(load("made", validation=0).train.targets) == 24
    plain = load("made", standardise=False, dtype=torch.float64)
    np.testing.assert_allclose(plain.test.inputs, unit[24:])
    part = load("made", validation=0.5).validation
    assert part is not None
    assert len(part.targets) == 12


def test_channel_statistics_match_numpy():
    images = STREAM.integers(0, 256, (7, 3, 5, 5), dtype=np.uint8)
    images[:, 2] = 9
    mean, std = channel_statistics(images)
    np.testing.assert_allclose(mean, (images / 255).mean((0, 2, 3))[:, None, None], rtol=1e-12)
    np.testing.assert_allclose(std[:2], (images[:, :2] / 255).std((0, 2, 3))[:, None, None], rtol=1e-12)
    assert std[2] == 1


def test_column_statistics_of_small_whole_numbers():
    values = STREAM.integers(0, 9, (40, 3)).astype(np.uint8)
    mean, std = column_statistics(values)
    np.testing.assert_allclose(mean, values.mean(0))
    np.testing.assert_allclose(std, values.std(0))


def test_foreign_inputs_take_the_scaling_they_are_given(monkeypatch):
    images = STREAM.integers(0, 256, (8, 1, 4, 4), dtype=np.uint8)
    classes = np.zeros(8, np.uint8)
    none = (images[:0], classes[:0])
    options = {"task": "classification", "kind": "image", "class_names": ("a",), "splits": 1}
    registered(monkeypatch, Raw(train=none, test=(images, classes)), **options)
    scaling = Scaling(torch.full((1, 1, 1), 0.25), torch.full((1, 1, 1), 2.0))
    data = load("made", input_scaling=scaling, dtype=torch.float64)
    np.testing.assert_allclose(data.test.inputs, (images / 255 - 0.25) / 2, atol=1e-12)
    wrong = Scaling(torch.zeros(3, 1, 1), torch.ones(3, 1, 1))
    with pytest.raises(ConfigError, match=r"input_scaling.shift must fit inputs of shape \[1, 4, 4\], got \[3, 1, 1\]"):
        load("made", input_scaling=wrong)
    with pytest.raises(ConfigError, match="above 0"):
        load("made", input_scaling=Scaling(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)))
    with pytest.raises(ConfigError, match="must be a Scaling"):
        load("made", input_scaling=(0.5, 0.5))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="only the test part"):
        load("made", validation=0.5)


def test_words_are_whole_numbers_and_unscaled(monkeypatch):
    words = STREAM.integers(0, 20000, (12, 5)).astype(np.uint16)
    classes = (np.arange(12) % 2).astype(np.uint8)
    raw = Raw(train=(words[:8], classes[:8]), test=(words[8:], classes[8:]))
    registered(monkeypatch, raw, task="binary", kind="tokens", class_names=("no", "yes"), tail=2, splits=1)
    data = load("made")
    assert data.train.inputs.dtype == torch.int64
    assert data.train.inputs.tolist() == words[:6].tolist()
    assert data.input_scaling is None
    with pytest.raises(ConfigError, match="word numbers"):
        load("made", input_scaling=Scaling(torch.zeros(5), torch.ones(5)))


def test_series_use_the_statistics_they_bring(monkeypatch):
    series = STREAM.normal(2, 3, (9, 4, 2)).astype(np.float32)
    classes = np.arange(9) % 2
    parts = [(series[rows], classes[rows]) for rows in (slice(3), slice(3, 6), slice(6, 9))]
    statistics = (np.array([2.0, 0.0]), np.array([3.0, 1.0]))
    raw = Raw(train=parts[0], validation=parts[1], test=parts[2], statistics=statistics)
    registered(monkeypatch, raw, task="binary", kind="series", class_names=("no", "yes"), splits=1)
    data = load("made", dtype=torch.float64)
    assert data.validation is not None
    np.testing.assert_allclose(data.validation.inputs, (series[3:6] - statistics[0]) / statistics[1], rtol=1e-12)
    assert load("made", validation=0).validation is None
    with pytest.raises(ConfigError, match="validation part of its own"):
        load("made", validation=0.5)


def test_classes_out_of_range_are_refused(monkeypatch):
    raw = Raw(train=(np.ones((4, 1)), np.array([0, 1, 2, 1])))
    registered(monkeypatch, raw, task="classification", class_names=("a", "b"))
    with pytest.raises(StorageError, match="must be 0 to 1, got"):
        load("made")


@pytest.mark.parametrize("split", [-1, 20, 1.0, True, "0"])
def test_splits_out_of_range(split):
    with pytest.raises(ConfigError, match="split of 'wine' must be a whole number from 0 to 19, got"):
        load("wine", split)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": 1.0}, r"validation must be a number in \[0, 1\)"),
        ({"validation": -0.1}, r"validation must be a number in \[0, 1\)"),
        ({"dtype": torch.int64}, "floating point"),
        ({"num_data": 5}, "num_data is for synthetic sets"),
        ({"target": "a"}, "target and task are for files of your own"),
        ({"task": "binary"}, "target and task are for files of your own"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load("wine", **options)


def test_bad_sizes_and_names_are_refused():
    with pytest.raises(ConfigError, match="num_data must be a whole number"):
        load("sinc", num_data=0)
    with pytest.raises(ConfigError, match="unknown data set 5"):
        load(5)  # pyright: ignore[reportArgumentType]


def test_dtype_and_description():
    assert load("diabetes").train.inputs.dtype == torch.get_default_dtype()
    data = load("diabetes", dtype=torch.float64)
    assert data.train.inputs.dtype == data.train.targets.dtype == torch.float64
    assert data.target_scaling is not None
    assert data.target_scaling.scale.dtype == torch.float64
    assert repr(data) == (
        "Data('diabetes', regression, split 0 of 20: 354 training, 88 test rows, inputs [10], outputs 1)"
    )

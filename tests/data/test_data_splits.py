import numpy as np
import pytest

from dubito.data.splits import split_rows, validation_rows
from dubito.errors import ConfigError


@pytest.mark.parametrize(("num_data", "fraction"), [(308, 0.9), (506, 0.9), (17, 0.8)])
def test_splits_follow_the_published_rule(num_data, fraction):
    stream = np.random.RandomState(1)
    for split in range(6):
        rows = stream.choice(range(num_data), num_data, replace=False)  # the rule as its authors wrote it
        count = round(fraction * num_data)
        train, test = split_rows(num_data, split, fraction)
        assert train.tolist() == rows[:count].tolist()
        assert test.tolist() == rows[count:].tolist()


@pytest.mark.parametrize(
    ("num_data", "split", "first", "last", "counts"),
    [
        (308, 0, [73, 304, 228, 238, 259], [72, 235, 37], (277, 31)),
        (308, 19, [122, 18, 305, 94, 132], [75, 135, 290], (277, 31)),
        (45730, 4, [38125, 26784, 33990, 1158, 5140], [7729, 9710, 7829], (41157, 4573)),
    ],
)
def test_splits_equal_those_published_with_the_benchmark(num_data, split, first, last, counts):
    train, test = split_rows(num_data, split, 0.9)
    assert train[:5].tolist() == first
    assert test[-3:].tolist() == last
    assert (len(train), len(test)) == counts


def test_validation_rows_divide_the_training_rows_and_stay_the_same():
    train, aside = validation_rows(101, 0.2, name="a", split=3)
    assert len(aside) == 20
    assert sorted([*train, *aside]) == list(range(101))
    assert train.tolist() == sorted(train)
    again = validation_rows(101, 0.2, name="a", split=3)
    assert again[1].tolist() == aside.tolist()
    for name, split in (("a", 4), ("b", 3)):
        assert validation_rows(101, 0.2, name=name, split=split)[1].tolist() != aside.tolist()


def test_global_random_state_is_left_alone():
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    split_rows(20, 1, 0.9)
    validation_rows(20, 0.5, name="a", split=0)
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_validation_must_leave_rows_on_both_sides(fraction):
    with pytest.raises(ConfigError, match="at least 1 row on either side"):
        validation_rows(10, fraction, name="a", split=0)

import numpy as np
import pytest

from dubito.data import physionet

VARIABLES = ("HR", "pH", "MechVent")
STATIC = ("Age", "Gender", "Height", "ICUType", "Weight")


def stays(seed: int, num_stays: int = 4) -> dict[str, np.ndarray]:
    stream = np.random.default_rng(seed)
    counts = stream.integers(0, 60, num_stays)
    total = counts.sum()
    param = stream.integers(0, 3, total).astype(np.uint8)
    value = np.where(param == 2, 1.0, stream.normal(10, 3, total)).astype(np.float32)
    minute = stream.integers(0, 2881, total).astype(np.uint16)
    minute[:1] = 2880
    static = np.stack(
        [
            stream.uniform(20, 90, num_stays),
            stream.integers(0, 2, num_stays),
            stream.uniform(150, 200, num_stays),
            stream.integers(1, 5, num_stays),
            stream.uniform(50, 100, num_stays),
        ],
        axis=1,
    ).astype(np.float32)
    static[0, 2] = -1
    return {
        "offset": np.concatenate([[0], counts.cumsum()]).astype(np.uint32),
        "param": param,
        "value": value,
        "minute": minute,
        "static": static,
        "static_names": np.array(STATIC),
        "param_names": np.array(VARIABLES),
        "in_hospital_death": stream.integers(0, 2, num_stays).astype(np.int16),
    }


@pytest.fixture
def sets(tmp_path):
    made = [stays(seed) for seed in range(3)]
    paths = []
    for number, arrays in enumerate(made):
        paths.append(tmp_path / f"{number}.npz")
        np.savez(paths[-1], **arrays)
    return made, paths


def reference(arrays, low, high, before):
    """Hour by hour and value by value."""
    num_stays = len(arrays["offset"]) - 1
    series = np.empty((num_stays, 48, 3))
    mask = np.zeros((num_stays, 48, 3))
    for stay in range(num_stays):
        rows = range(arrays["offset"][stay], arrays["offset"][stay + 1])
        for variable in range(3):
            current = before[variable]
            for hour in range(48):
                held = [
                    min(max(float(arrays["value"][row]), low[variable]), high[variable])
                    for row in rows
                    if arrays["param"][row] == variable and min(int(arrays["minute"][row]) // 60, 47) == hour
                ]
                if held:
                    current = sum(held) / len(held)
                    mask[stay, hour, variable] = 1
                series[stay, hour, variable] = current
    return series, mask


def test_series_match_a_plain_loop(sets):
    made, paths = sets
    raw = physionet.read(paths)
    first = made[0]
    groups = [first["value"][first["param"] == variable].astype(float) for variable in range(3)]
    low, high = np.array([np.quantile(group, [0.001, 0.999]) for group in groups]).T
    bins, mask = reference(first, low, high, np.zeros(3))
    shift = np.array([bins[..., v][mask[..., v] == 1].mean() for v in range(3)])
    scale = np.array([bins[..., v][mask[..., v] == 1].std() for v in range(3)])
    assert raw.statistics is not None
    np.testing.assert_allclose(raw.statistics[0][:3], shift, rtol=1e-6)
    np.testing.assert_allclose(raw.statistics[1][:2], scale[:2], rtol=1e-6)
    assert raw.statistics[1][2] == 1  # the ventilator is only ever on: a constant is not divided by 0
    assert raw.validation is not None and raw.test is not None
    for arrays, (inputs, targets) in zip(made, (raw.train, raw.validation, raw.test), strict=True):
        series, mask = reference(arrays, low, high, shift)
        np.testing.assert_allclose(inputs[..., :3], series, rtol=1e-5)
        assert (inputs[..., 3:6] == mask).all()
        assert (targets == arrays["in_hospital_death"]).all()


def test_what_is_known_of_a_patient_stands_in_every_hour(sets):
    made, paths = sets
    raw = physionet.read(paths)
    names = list(raw.feature_names)
    assert len(names) == raw.train[0].shape[2] == 3 + 3 + 4 + 4 + 4
    inputs = raw.train[0]
    assert raw.statistics is not None
    height, known = names.index("Height"), names.index("Height known")
    assert inputs[0, :, known].tolist() == [0] * 48
    np.testing.assert_allclose(inputs[0, :, height], raw.statistics[0][height], rtol=1e-6)
    assert inputs[1, :, known].tolist() == [1] * 48
    assert (inputs[1, :, height] == inputs[1, 0, height]).all()
    unit = made[0]["static"][:, 3]
    for stay in range(4):
        flags = inputs[stay, 0, names.index("ICUType 1") :]
        assert flags.tolist() == [float(unit[stay] == kind) for kind in (1, 2, 3, 4)]


def test_statistics_know_only_set_a(sets, tmp_path):
    made, paths = sets
    raw = physionet.read(paths)
    made[2]["value"] *= 100
    np.savez(paths[2], **made[2])
    again = physionet.read(paths)
    assert raw.statistics is not None and again.statistics is not None
    for old, new in zip(raw.statistics, again.statistics, strict=True):
        assert (old == new).all()

"""Corruption results, foreign rows and how they are told apart."""

import dataclasses

import numpy as np
import pytest
import scipy.io
import sklearn.metrics
import torch
from torch import nn

import dubito
from dubito import Categorical, ConfigError, DataError, Gaussian, StorageError, Training, UnknownNameError
from dubito.data import Data, Part, Scaling, load
from dubito.prediction import CategoricalPrediction, RealPrediction
from dubito.shifts import (
    CorruptionResults,
    corrupt,
    detection,
    evaluate_corruptions,
    far_range,
    feature_shuffled,
    held_out,
    histogram,
    ood_pair,
    scores,
)
from dubito.shifts.svhn import read


def image_set(count: int = 60) -> Data:
    """Bright and dark squares, standardised, as a data set."""
    stream = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (count,), generator=stream)
    pixels = 0.3 * torch.rand(count, 1, 8, 8, generator=stream) + 0.5 * labels[:, None, None, None]
    scaling = Scaling(torch.full((1, 1, 1), 0.4), torch.full((1, 1, 1), 0.27))
    part = Part(scaling.apply(pixels), labels)
    base = load("digits")
    return dataclasses.replace(
        base, name="squares", train=part, validation=None, test=part, num_outputs=2, num_classes=2,
        class_names=("dark", "bright"), input_scaling=scaling,
    )  # fmt: skip


@pytest.fixture(scope="module")
def fitted():
    data = image_set()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 2))
    training = Training(epochs=8, batch_size=20, lr=1e-2)
    posterior = dubito.DeepEnsemble(members=2).fit(net, data.train, Categorical(), training=training)
    return posterior, data


def test_corruption_results_are_the_metrics_of_corrupted_images(fitted):
    posterior, data = fitted
    names, severities = ("contrast", "gaussian-noise"), (1, 5)
    found = evaluate_corruptions(posterior, data, names=names, severities=severities, subset=40, seed=3)
    assert found.num_images == 40 and set(found.corrupted) == {(n, s) for n in names for s in severities}
    rows = torch.randperm(60, generator=dubito.seeds.generator(3, "shifts", "subset"))[:40].sort().values
    pixels = data.input_scaling.undo(data.test.inputs[rows]).clamp(0, 1)
    noisy = data.input_scaling.apply(corrupt(pixels, "gaussian-noise", 5, seed=3))
    expected = posterior.evaluate((noisy, data.test.targets[rows]), seed=3)
    for measure in ("accuracy", "nll", "ece"):
        assert found.corrupted["gaussian-noise", 5][measure] == pytest.approx(expected[measure], rel=1e-5)
        own = [found.corrupted[key][measure] for key in found.corrupted]
        assert getattr(found, measure) == pytest.approx(np.mean(own))
        assert found.mean(measure, severity=5) == pytest.approx(
            np.mean([found.corrupted[name, 5][measure] for name in names])
        )
    assert found.clean["accuracy"] >= found.accuracy - 0.05
    assert evaluate_corruptions(posterior, data, names=("fog",), severities=(1,), subset=None).num_images == 60
    with pytest.raises(ConfigError, match="severity 3"):
        found.mean("nll", severity=3)


def test_own_images_with_their_own_preparation(fitted):
    """A pair of pixels and labels gives what the data set they come from gives."""
    posterior, data = fitted
    chosen = {"names": ("contrast", "jpeg"), "severities": (2,), "subset": 30, "seed": 1}
    expected = evaluate_corruptions(posterior, data, **chosen)
    pixels = data.input_scaling.undo(data.test.inputs).clamp(0, 1)
    for pair in ((pixels, data.test.targets), (pixels.numpy(), data.test.targets.numpy())):
        found = evaluate_corruptions(posterior, pair, prepare=data.input_scaling.apply, **chosen)
        assert found == expected
    raw = evaluate_corruptions(posterior, (pixels, data.test.targets), **chosen)
    assert raw.clean["nll"] != expected.clean["nll"]  # the network's inputs are the pixels themselves
    refused = [
        ((pixels, data.test.targets[:5]), "one for each of 60 images"),
        ((pixels, data.test.targets.float()), "whole numbers"),
        ((data.test.inputs, data.test.targets), "undo their scaling"),
        ((pixels[:, 0], data.test.targets), r"\[B, C, H, W\]"),
    ]
    with pytest.raises(ConfigError, match=r"data must be a Data or .* got a Tensor"):
        evaluate_corruptions(posterior, pixels, **chosen)  # pyright: ignore
    for pair, message in refused:
        with pytest.raises(DataError, match=message):
            evaluate_corruptions(posterior, pair, **chosen)
    with pytest.raises(ConfigError, match="brings its own scaling"):
        evaluate_corruptions(posterior, data, prepare=data.input_scaling.apply, **chosen)


def test_bad_names_are_found_before_anything_is_predicted(fitted):
    posterior, data = fitted

    def never(pixels):
        raise AssertionError("work has started")

    pair = (data.input_scaling.undo(data.test.inputs).clamp(0, 1), data.test.targets)
    with pytest.raises(UnknownNameError, match="fog"):
        evaluate_corruptions(posterior, pair, prepare=never, names=("fog", "fogg"))
    with pytest.raises(ConfigError, match="severity"):
        evaluate_corruptions(posterior, pair, prepare=never, severities=(1, 6))


def test_mean_corruption_error_by_hand():
    def results(errors: dict) -> CorruptionResults:
        corrupted = {key: {"accuracy": 1 - error, "nll": 0.0, "ece": 0.0} for key, error in errors.items()}
        return CorruptionResults(clean={}, corrupted=corrupted, num_images=1, constants="cifar-c")

    own = results({("fog", 1): 0.1, ("fog", 2): 0.3, ("snow", 1): 0.2, ("snow", 2): 0.2})
    base = results({("fog", 1): 0.2, ("fog", 2): 0.2, ("snow", 1): 0.1, ("snow", 2): 0.4})
    assert own.mce(base) == pytest.approx((0.4 / 0.4 + 0.4 / 0.5) / 2)
    assert base.mce(base) == pytest.approx(1)
    with pytest.raises(DataError, match="same corruptions"):
        own.mce(results({("fog", 1): 0.2}))
    with pytest.raises(DataError, match="no error under fog"):
        own.mce(results({("fog", 1): 0.0, ("fog", 2): 0.0, ("snow", 1): 0.1, ("snow", 2): 0.4}))


def test_tables_have_no_corruptions(fitted):
    with pytest.raises(DataError, match=r"need images \[B, C, H, W\]"):
        evaluate_corruptions(fitted[0], load("digits"))


# -- pairs --------------------------------------------------------------------------------------------------


def test_rotated_digits():
    pair = ood_pair("digits/rotated", split=2)
    assert pair.inside.split == 2 and pair.outside.shape == pair.inside.test.inputs.shape
    scaling = pair.inside.input_scaling
    own, turned = (scaling.undo(x).unflatten(1, (8, 8)) for x in (pair.inside.test.inputs, pair.outside))
    expected = np.rot90(own.numpy(), axes=(1, 2))
    np.testing.assert_allclose(turned.numpy(), expected, atol=1e-4)
    with pytest.raises(UnknownNameError, match="mnist/notmnist"):
        ood_pair("mnist/letters")


def test_named_sets_are_scaled_alike(monkeypatch, tmp_path):
    """Two sets that need no file stand for those that do."""
    from dubito.shifts import pairs

    pair = pairs._named("cubic-inf", "cubic-inf")(split=1)
    assert torch.equal(pair.outside, load("cubic-inf", input_scaling=pair.inside.input_scaling).test.inputs)
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"fetch http://ufldl.*put it at <folder>/svhn/test_32x32.mat"):
        ood_pair("cifar10/svhn")


def test_svhn_is_read_from_its_publishers_form(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
    scipy.io.savemat(tmp_path / "test.mat", {"X": pixels, "y": np.ones((5, 1))})
    found = read(tmp_path / "test.mat")
    assert found.shape == (5, 3, 32, 32)
    assert float(found[4, 2, 7, 9]) == pytest.approx(pixels[7, 9, 2, 4] / 255)
    scipy.io.savemat(tmp_path / "bad.mat", {"X": pixels[:5]})
    with pytest.raises(StorageError, match=r"should hold images"):
        read(tmp_path / "bad.mat")
    (tmp_path / "no.mat").write_text("nothing")
    with pytest.raises(StorageError, match="fetch"):
        read(tmp_path / "no.mat")


def test_held_out_classes_are_foreign_and_the_rest_is_renumbered():
    data = load("digits")
    pair = held_out(data, (3, 8))
    inside = pair.inside
    assert inside.num_classes == inside.num_outputs == len(inside.class_names) == 8
    assert inside.class_names == tuple("01245679")
    for part, own in ((inside.train, data.train), (inside.test, data.test)):
        kept = ~torch.isin(own.targets, torch.tensor([3, 8]))
        assert torch.equal(part.inputs, own.inputs[kept])
        names = [data.class_names[label] for label in own.targets[kept].tolist()]
        assert [inside.class_names[label] for label in part.targets.tolist()] == names
    assert torch.equal(pair.outside, data.test.inputs[torch.isin(data.test.targets, torch.tensor([3, 8]))])
    for wrong in ((), (3, 3), (10,), tuple(range(9))):
        with pytest.raises(ConfigError, match="leaving at least two"):
            held_out(data, wrong)
    with pytest.raises(DataError, match="a regression"):
        held_out(load("diabetes"), (1,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tables_taken_apart(dtype):
    stream = torch.Generator().manual_seed(0)
    first = torch.randn(400, 1, generator=stream, dtype=dtype)
    table = torch.cat([first, first + 0.1 * torch.randn(400, 1, generator=stream, dtype=dtype), first * 0 + 2], 1)
    shuffled = feature_shuffled(table, seed=1)
    assert torch.equal(shuffled.sort(0).values, table.sort(0).values) and shuffled.dtype == dtype
    correlation = torch.corrcoef(shuffled[:, :2].T)[0, 1]
    assert abs(float(correlation)) < 4 / 20 and not torch.equal(shuffled, feature_shuffled(table, seed=2))
    far = far_range(table, 2.5, seed=1)
    low, high = table.aminmax(dim=0)
    span = torch.tensor([*(high - low)[:2].tolist(), 1.0], dtype=dtype)
    below, above = (low - far) / span, (far - high) / span
    outside = torch.maximum(below, above)
    assert (outside >= 1 - 1e-5).all() and (outside <= 2.5 + 1e-5).all()
    assert 0.4 < float((below > above).double().mean()) < 0.6
    with pytest.raises(ConfigError, match="above 1"):
        far_range(table, 0.5)
    with pytest.raises(DataError, match="a table"):
        feature_shuffled(table[:, 0])


# -- detection ----------------------------------------------------------------------------------------------


def classes(count: int, sharpness: float, seed: int) -> CategoricalPrediction:
    logits = sharpness * torch.randn(6, count, 4, generator=torch.Generator().manual_seed(seed))
    return Categorical().build(None).predictive(logits)


def test_detection_is_sklearns():
    inside, outside = classes(150, 4.0, 0), classes(90, 1.5, 1)
    found = detection(inside, outside)
    assert set(found) == {"total", "epistemic", "function_variance", "confidence"}
    truth = np.r_[np.zeros(150), np.ones(90)]
    for name, own in found.items():
        both = torch.cat([scores(inside)[name], scores(outside)[name]]).double().numpy()
        assert own.auroc == pytest.approx(sklearn.metrics.roc_auc_score(truth, both), abs=1e-6)
        assert own.aupr == pytest.approx(sklearn.metrics.average_precision_score(truth, both), abs=1e-6)
        fpr, tpr, _ = sklearn.metrics.roc_curve(truth, both, drop_intermediate=False)
        assert own.fpr95 == pytest.approx(fpr[tpr >= 0.95][0], abs=1e-6)
        assert own.inside == pytest.approx(both[:150].mean()) and own.outside == pytest.approx(both[150:].mean())
    torch.testing.assert_close(scores(inside)["confidence"], 1 - inside.probs.amax(1))


def test_reals_and_positions():
    stream = torch.Generator().manual_seed(0)
    wide = RealPrediction(torch.randn(5, 30, 2, generator=stream), torch.ones(1, 1, 2))
    narrow = RealPrediction(0.1 * torch.randn(5, 30, 2, generator=stream), torch.ones(1, 1, 2))
    found = detection(narrow, wide)
    assert set(found) == {"total", "epistemic"} and found["epistemic"].auroc > 0.95
    variances = wide.means.var(0, unbiased=False)
    torch.testing.assert_close(scores(wide)["epistemic"], variances.sqrt().prod(1).sqrt())
    one = RealPrediction(torch.tensor([[[2.0]], [[8.0]]]), torch.full((1, 1, 1), 16.0))
    assert {name: float(score) for name, score in scores(one).items()} == pytest.approx(
        {"total": 5, "epistemic": 3}
    )  # standard deviations, in the target's units
    units = (torch.zeros(2), torch.tensor([1e-3, 1e3]))
    for name, expected in found.items():  # units of outputs change no rank
        assert detection(narrow.rescaled(*units), wide.rescaled(*units))[name].auroc == expected.auroc
    pixels = Categorical().build(None).predictive(torch.randn(3, 7, 4, 2, 2, generator=stream))
    torch.testing.assert_close(scores(pixels)["total"], pixels.total.mean((1, 2)))
    assert Gaussian().build(torch.zeros(3, 1)).predictive(torch.zeros(2, 3, 1)).std.shape == (3, 1)


def test_never_without_rows_of_the_data_set():
    inside, outside = classes(20, 4.0, 0), classes(10, 1.5, 1)
    for call in (detection, histogram):
        with pytest.raises(DataError, match=r"inside must be a Prediction.*unless compared with that of the data set"):
            call(None, outside)
        with pytest.raises(DataError, match="outside must be"):
            call(inside, None)
    with pytest.raises(DataError, match="one posterior"):
        detection(inside, RealPrediction(torch.zeros(2, 3, 1), torch.ones(1, 1, 1)))


def test_histograms_share_their_bins():
    inside, outside = classes(150, 4.0, 0), classes(90, 1.5, 1)
    found = histogram(inside, outside, "total", num_bins=8)
    top = float(torch.cat([inside.total, outside.total]).max())
    for own, prediction in ((found.inside, inside), (found.outside, outside)):
        expected = np.histogram(prediction.total.numpy(), bins=8, range=(0, top))[0] / len(prediction)
        np.testing.assert_allclose(own.numpy(), expected, atol=1e-6)
    assert float(found.edges[-1]) == pytest.approx(top) and len(found.edges) == 9
    with pytest.raises(ConfigError, match="score must be one of"):
        histogram(inside, outside, "variance")

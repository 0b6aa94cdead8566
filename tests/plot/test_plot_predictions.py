"""Plots of predictions, read back from the axes."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from dubito import Categorical, ConfigError, DataError, UnknownNameError, metrics, plot
from dubito.active import Curve, CurvePoint
from dubito.prediction import BernoulliPrediction, CategoricalPrediction, RealPrediction


def classes(rows: int = 200, seed: int = 0, sharp: float = 2.0) -> CategoricalPrediction:
    """Predictions averaged over four draws."""
    stream = torch.Generator().manual_seed(seed)
    return Categorical().build(None).predictive(sharp * torch.randn(4, rows, 3, generator=stream))  # pyright: ignore


def reals(rows: int = 50, outputs: int = 1) -> RealPrediction:
    means = torch.randn(6, rows, outputs, generator=torch.Generator().manual_seed(1))
    return RealPrediction(means, torch.full((6, 1, outputs), 0.25))


def labels(rows: int = 200) -> torch.Tensor:
    return torch.randint(0, 3, (rows,), generator=torch.Generator().manual_seed(3))


def test_reliability_draws_the_curve_of_each_prediction():
    predictions = {"sharp": classes(sharp=4.0), "flat": classes(seed=1, sharp=0.5)}
    axis = plot.reliability(predictions, labels(), num_bins=10)
    _, *lines = axis.get_lines()
    for line, (name, prediction) in zip(lines, predictions.items(), strict=True):
        curve = metrics.reliability_curve(prediction.probs, labels(), 10)
        there = curve.count > 0
        np.testing.assert_allclose(line.get_xdata(), curve.confidence[there])
        np.testing.assert_allclose(line.get_ydata(), curve.accuracy[there])
        assert line.get_label() == f"{name}, ECE {metrics.ece(prediction.probs, labels(), 10):.3f}"


def test_reliability_of_two_classes():
    logits = torch.linspace(-3, 3, 40)[:, None]
    log_yes, log_no = (torch.nn.functional.logsigmoid(sign * logits) for sign in (1, -1))
    none = torch.zeros(40, 1)
    prediction = BernoulliPrediction(log_yes, none, log_no, function_variance=none)
    targets = (torch.arange(40) % 2).long()
    axis = plot.reliability(prediction, targets, num_bins=5)
    yes = log_yes.exp().flatten()
    expected = metrics.reliability_curve(torch.stack([1 - yes, yes], 1), targets, 5)
    np.testing.assert_allclose(axis.get_lines()[1].get_ydata(), expected.accuracy[expected.count > 0])
    with pytest.raises(ConfigError, match="ClassPrediction"):
        plot.reliability(reals(), torch.zeros(50))  # pyright: ignore


@pytest.mark.parametrize("score", ["total", "aleatoric", "epistemic", "confidence"])
def test_histograms_hold_all_rows(score):
    inside, outside = classes(), classes(80, seed=5, sharp=0.5)
    axis = plot.ood_histogram(inside, outside, score=score, num_bins=12)
    heights = sum(patch.get_height() for patch in axis.patches[:12])
    assert heights == pytest.approx(1)
    edges = np.linspace(*np.percentile(np.r_[getattr(inside, score), getattr(outside, score)], [0, 100]), 13)
    expected = np.histogram(getattr(inside, score), edges)[0] / len(inside)
    np.testing.assert_allclose([patch.get_height() for patch in axis.patches[:12]], expected, atol=0.011)


def test_histograms_of_reals_are_standard_deviations():
    axis = plot.ood_histogram(reals(), reals(70))
    low, high = axis.get_xlim()
    assert low < float(reals().std.min()) < float(reals().std.max()) < high
    assert axis.get_xlabel() == "total, standard deviation"
    with pytest.raises(UnknownNameError, match="unknown score 'confidence'"):
        plot.ood_histogram(reals(), reals(), score="confidence")


def test_decomposition_marks_wrong_answers():
    prediction, targets = classes(), labels()
    axis = plot.decomposition(prediction, targets, outside=classes(30, seed=9))
    right, wrong, outside = axis.collections
    hits = prediction.labels == targets
    np.testing.assert_allclose(
        right.get_offsets(), torch.stack([prediction.aleatoric, prediction.epistemic], 1)[hits], rtol=1e-5
    )
    assert len(wrong.get_offsets()) == int((~hits).sum()) and len(outside.get_offsets()) == 30
    (rows,) = plot.decomposition(reals()).collections
    np.testing.assert_allclose(rows.get_offsets()[:, 0], 0.5, rtol=1e-5)
    np.testing.assert_allclose(rows.get_offsets()[:, 1], reals().epistemic.sqrt().flatten(), rtol=1e-5)
    with pytest.raises(DataError, match="leave them out"):
        plot.decomposition(reals(), torch.zeros(50))


def test_decomposition_knows_labels_that_say_nothing():
    logits = torch.tensor([[[2.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [2.0, 0.0]]])  # rows × classes × positions
    likelihood = Categorical(ignore_index=-100, class_axis=1).build(logits)
    prediction = likelihood.predictive(logits.unsqueeze(0))
    targets = prediction.labels.clone()
    targets[0, 1] = -100
    right, wrong = plot.decomposition(prediction, targets).collections
    assert len(right.get_offsets()) == 2 and len(wrong.get_offsets()) == 0


def test_fans_draw_intervals_over_the_input_or_in_order():
    prediction, x = reals(), torch.linspace(1, -1, 50)
    axis = plot.regression_fan(prediction, x[:, None], prediction.mean, levels=(0.9,))
    mean, truth = axis.get_lines()
    np.testing.assert_allclose(mean.get_xdata(), x.flip(0))
    np.testing.assert_allclose(mean.get_ydata(), prediction.mean.flatten().flip(0))
    np.testing.assert_allclose(truth.get_ydata(), mean.get_ydata())
    (band,) = axis.collections
    low, high = prediction.interval(0.9)
    corners = band.get_paths()[0].vertices
    assert corners[:, 1].min() == pytest.approx(float(low.min())) and corners[:, 1].max() == pytest.approx(
        float(high.max())
    )
    ordered = plot.regression_fan(prediction).get_lines()[0].get_ydata()
    np.testing.assert_allclose(ordered, np.sort(prediction.mean.flatten()))
    with pytest.raises(DataError, match="one output"):
        plot.regression_fan(reals(outputs=2))
    with pytest.raises(DataError, match="one number per row"):
        plot.regression_fan(prediction, torch.zeros(50, 2))


def curve(shift: float) -> Curve:
    points = [
        CurvePoint(
            num_labelled=10 * step, metrics={"rmse": shift + 1 / step}, chosen=(), fit_seconds=1, acquisition_seconds=0
        )
        for step in (1, 2, 4)
    ]
    return Curve(points=tuple(points))


def test_active_learning_curves_have_standard_errors_over_splits():
    axis = plot.active_learning_curve({"bald": [curve(0.0), curve(0.2)], "random": curve(1.0)})
    bald, random = axis.get_lines()
    np.testing.assert_allclose(bald.get_ydata(), [1.1, 0.6, 0.35])
    np.testing.assert_allclose(random.get_ydata(), [2, 1.5, 1.25])
    assert list(bald.get_xdata()) == [10, 20, 40]
    (band,) = axis.collections
    # two splits 0.2 apart: the standard error of their mean is 0.1
    assert band.get_paths()[0].vertices[:, 1].max() == pytest.approx(1.2)
    for curves in ({}, {"none": []}):
        with pytest.raises(DataError, match="at least one"):
            plot.active_learning_curve(curves)
    with pytest.raises(ConfigError, match="metric must be one of rmse"):
        plot.active_learning_curve({"bald": curve(0.0)}, "accuracy")


def test_an_axis_that_is_given_is_used_and_returned():
    axis = Figure().add_subplot()
    assert plot.reliability(classes(), labels(), axis=axis) is axis
    assert plot.regression_fan(reals(), axis=axis) is axis
    with pytest.raises(ConfigError, match="axis must be an axis of matplotlib"):
        plot.decomposition(classes(), axis="here")  # pyright: ignore

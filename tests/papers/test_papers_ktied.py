"""The k-tied Normal's tables: metrics against brute force, shared trainings, schedules, and the paper's numbers."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import nn
from torch.func import functional_call

from dubito.metrics import Over
from dubito.training import KL
from papers.k_tied import figure_6, mnist, table_2, tables_4_5
from papers.runner import tables
from papers.runner.experiment import Cell

DIGITS = mnist.generate_cell(Cell(mnist.DATA, "mean-field"))
SHORT = mnist.Regime(epochs=1, num_samples=3)


def test_metrics_are_those_of_draws_written_out():
    posterior = mnist.trained(SHORT, DIGITS, 0, steps=2)
    found, details = mnist.tested(posterior, DIGITS.test, 50, num_samples=3, seed=4)
    inputs, targets = DIGITS.test
    each = []
    for index in range(3):
        weights = posterior.draw(index, posterior.generator(4, index))
        each.append(functional_call(posterior.network, weights, inputs).double().softmax(-1))
    probs = torch.stack(each)
    rows = torch.arange(len(targets))
    expected = -probs[:, rows, targets].log().mean()
    nll = -probs.mean(0)[rows, targets].log()
    divergence = sum(
        torch.distributions.kl_divergence(
            torch.distributions.Normal(mean.double(), posterior.weight_scale(name).std.double()),
            torch.distributions.Normal(torch.zeros(()).double(), 0.2),
        ).sum()
        for name, mean in posterior.weights().items()
    )
    correct = (probs.mean(0).argmax(-1) == targets).double()
    wanted = {
        "neg_elbo": float(divergence / 50 + expected),
        "nll": float(nll.mean()),
        "accuracy": 100 * float(correct.mean()),
    }
    assert found == pytest.approx(wanted, rel=1e-5)
    assert details["nll_se"] == pytest.approx(float(nll.std()) / len(targets) ** 0.5, rel=1e-5)
    assert details["kl_per_image"] == pytest.approx(float(divergence) / 50, rel=1e-5)


def test_a_whole_training_is_kept_and_found_again(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("papers.runner.trained.cache_folder", lambda: tmp_path / "dubito" / "data")
    first = mnist.trained(SHORT, DIGITS, 0, None)
    (kept,) = (tmp_path / "dubito" / "trained").iterdir()
    written = kept.stat().st_mtime_ns
    monkeypatch.setattr("dubito.training.steps.GradientStepper.step", lambda *_: pytest.fail("trained again"))
    again = mnist.trained(SHORT, DIGITS, 0, None)
    for name, tensor in first.stored().items():
        assert torch.equal(tensor, again.stored()[name])
    assert kept.stat().st_mtime_ns == written
    monkeypatch.undo()
    monkeypatch.setattr("papers.runner.trained.cache_folder", lambda: tmp_path / "dubito" / "data")
    mnist.trained(replace(SHORT, rank=1), DIGITS, 0, None)
    mnist.trained(SHORT, DIGITS, 1, None)
    assert len(list(kept.parent.iterdir())) == 3


def test_rehearsals_keep_nothing(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("papers.runner.trained.cache_folder", lambda: tmp_path / "dubito" / "data")
    mnist.trained(SHORT, DIGITS, 0, steps=1)
    assert list(tmp_path.iterdir()) == []


def test_the_divergence_rises_as_in_the_paper():
    kl = figure_6.PERFORMANCE.scales["paper"].variants[mnist.DATA, "2-tied"]
    training = kl.settings.training(50_000, None)
    assert isinstance(training.kl, KL)
    weights = [training.kl.at(step, 49) for step in (0, 99, 100, 250, 14_699, 30_000)]
    assert weights == pytest.approx([0, 0, 0.005, 0.01, 0.73, 1.0])
    assert SHORT.training(50_000, None).kl == KL()


def test_factors_learn_at_the_full_rate():
    method = replace(SHORT, rank=3).method()
    objective = method.build(nn.Linear(8, 8), mnist.Categorical(), 10)
    assert {group["lr"] for group in objective.parameter_groups(0.1)} == {0.1}


def test_ratios_and_bounds_are_looked_at_where_they_should_be():
    settings = figure_6.Convergence(regime=replace(SHORT, rank=2), marks=(3, 5), window=2, every=2)
    cell = Cell(mnist.DATA, "2-tied", seed=1)
    (found,) = figure_6.convergence([cell], [DIGITS], settings, None)
    (shorter,) = figure_6.convergence([cell], [DIGITS], replace(settings, marks=(3,)), None)
    assert found.details["steps"] == [2, 3, 4, 5]
    names = ("snr", "median_snr", "neg_elbo")
    assert set(found.metrics) == {f"{name}_{mark}" for name in names for mark in (3, 5)}
    assert found.metrics["snr_3"] == shorter.metrics["snr_3"]
    assert found.metrics["neg_elbo_3"] == shorter.metrics["neg_elbo_3"]
    assert all(len(values) == 4 for values in found.details["mean_stds"].values())
    assert found.metrics["snr_5"] >= 1.0


def test_batches_are_whole_epochs_in_new_orders():
    train = mnist.Part(torch.arange(5.0)[:, None], torch.arange(5))
    batches = [batch.targets.tolist() for batch in figure_6._batches(train, 2, 3, 7)]
    assert [len(batch) for batch in batches] == [2, 2, 1, 2, 2, 1, 2]
    first, second = list(chain(*batches[:3])), list(chain(*batches[3:6]))
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 4]
    assert first != second


def test_truncation_says_how_much_fell_below_the_floor():
    cell = Cell(mnist.DATA, "1-tied")
    settings = table_2.Truncation(rank=1, floor=0.0101, regime=SHORT)
    (found,) = table_2.truncated([cell], [DIGITS], settings, 2)
    posterior = mnist.trained(SHORT, DIGITS, 0, 2)
    left, values, right = torch.linalg.svd(posterior.weight_scale("fc2.weight").std.double())
    best = values[0] * left[:, :1] @ right[:1]
    share = float((best < 0.0101).double().mean())
    assert 0.1 < share < 0.9
    assert found.details["share_below_floor"]["dense-2"] == pytest.approx(share, abs=1e-3)
    assert found.details["parameters"] == 481_614


def test_counts_are_the_papers_integers():
    published = tables()["ktied-table-5"].published
    for method, rank in mnist.RANKS.items():
        cell = Cell("tfp_resnet18", method)
        (outcome,) = tables_4_5.counted([cell], [tables_4_5.build(cell)], tables_4_5.Count(rank=rank), None)
        assert outcome.metrics["parameters"] == published["tfp_resnet18", method, "parameters"].value


def test_numbers_of_the_paper():
    two, left = tables()["ktied-table-2"].published, tables()["ktied-figure-6-left"].published
    assert two["mnist-mlp", "1-tied", "neg_elbo"].value == 3.41
    assert two["imdb-lstm", "3-tied", "nll"].error == 0.0056
    assert left["mnist-mlp", "3-tied", "nll"].value == 0.120
    assert left["cifar100-lenet", "1-tied", "accuracy"].value == 45.5
    assert left["mnist-mlp", "2-tied", "thousand_parameters"].error is None
    assert {number.over for key, number in left.items() if key[2] == "nll"} == {Over.EXAMPLES}
    right = tables()["ktied-figure-6-right"].published
    assert right["mnist-mlp", "2-tied", "snr_1000"].value == 7500
    assert right["mnist-mlp", "mean-field", "neg_elbo_9000"].error == 0.016
    assert {number.over for number in right.values()} == {Over.RUNS}
    # the binomial's standard error over 10,000 images, not one over 100 draws; accuracies are printed rounded
    for method, accuracy in (("mean-field", 0.976), ("1-tied", 0.936)):
        error = 100 * (accuracy * (1 - accuracy) / 10_000) ** 0.5
        assert two["mnist-mlp", method, "accuracy"].error == pytest.approx(error, abs=0.006)

"""The k-tied Normal's tables: metrics against brute force, shared trainings, schedules, and the paper's numbers."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import nn
from torch.func import functional_call

from dubito import Categorical
from dubito.data import Part
from dubito.errors import StorageError
from dubito.metrics import Over
from dubito.training import KL
from papers.k_tied import (
    draw,
    figure_3,
    figure_6,
    figure_7,
    page,
    table_1,
    table_2,
    tables_4_5,
    tasks,
    trainings,
    watched,
)
from papers.runner import tables
from papers.runner.experiment import Cell, Outcome
from papers.runner.store import Results, Spent

MADE_UP = tasks.generate_cell(Cell(tasks.MLP_DATA, "mean-field"))
DIGITS = tasks.MLP().rows(MADE_UP)
SHORT = trainings.Regime(task=tasks.MLP(), epochs=1, num_samples=3)


def binned_gap(probs: torch.Tensor, correct: torch.Tensor) -> float:
    """The expected calibration error over 15 bins of equal width, written out."""
    confidence, gap = probs.amax(-1), 0.0
    for number in range(15):
        inside = (confidence > number / 15) & (confidence <= (number + 1) / 15)
        gap += abs(float((confidence - correct)[inside].sum())) / len(correct)
    return gap


def test_metrics_are_those_of_draws_written_out():
    posterior = trainings.trained(SHORT, DIGITS, 0, steps=2)
    found, details = trainings.tested(posterior, DIGITS.test, 50, num_samples=3, seed=4)
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
        "brier": float((probs.mean(0) - nn.functional.one_hot(targets, 10)).square().sum(-1).mean()) - 1,
        "ece": binned_gap(probs.mean(0), correct),
    }
    assert found == pytest.approx(wanted, rel=1e-5)
    assert details["nll_se"] == pytest.approx(float(nll.std()) / len(targets) ** 0.5, rel=1e-5)
    assert details["kl_per_row"] == pytest.approx(float(divergence) / 50, rel=1e-5)


def test_a_whole_training_is_kept_and_found_again(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("papers.runner.trained.cache_folder", lambda: tmp_path / "dubito" / "data")
    first = trainings.trained(SHORT, DIGITS, 0, None)
    (kept,) = (tmp_path / "dubito" / "trained").iterdir()
    written = kept.stat().st_mtime_ns
    monkeypatch.setattr("dubito.training.steps.GradientStepper.step", lambda *_: pytest.fail("trained again"))
    again = trainings.trained(SHORT, DIGITS, 0, None)
    for name, tensor in first.stored().items():
        assert torch.equal(tensor, again.stored()[name])
    assert kept.stat().st_mtime_ns == written
    monkeypatch.undo()
    monkeypatch.setattr("papers.runner.trained.cache_folder", lambda: tmp_path / "dubito" / "data")
    trainings.trained(replace(SHORT, rank=1), DIGITS, 0, None)
    trainings.trained(SHORT, DIGITS, 1, None)
    assert len(list(kept.parent.iterdir())) == 3


def test_rehearsals_keep_nothing(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("papers.runner.trained.cache_folder", lambda: tmp_path / "dubito" / "data")
    trainings.trained(SHORT, DIGITS, 0, steps=1)
    assert list(tmp_path.iterdir()) == []


def test_the_divergence_rises_as_in_the_paper():
    (made,) = (table.experiment for table in figure_6.TABLES if table.name == "ktied-figure-6-left")
    settings = made.scales["paper"].variants[tasks.MLP_DATA, "2-tied"].settings
    training = settings.training(50_000, None)
    assert isinstance(training.kl, KL)
    weights = [training.kl.at(step, 49) for step in (0, 99, 100, 250, 14_699, 30_000)]
    assert weights == pytest.approx([0, 0, 0.005, 0.01, 0.73, 1.0])
    assert SHORT.training(50_000, None).kl == KL()


def test_factors_learn_at_the_full_rate():
    method = replace(SHORT, rank=3).method()
    objective = method.build(nn.Linear(8, 8), Categorical(), 10)
    assert {group["lr"] for group in objective.parameter_groups(0.1)} == {0.1}


def test_ratios_and_bounds_are_looked_at_where_they_should_be():
    settings = watched.Convergence(regime=replace(SHORT, rank=2), marks=(3, 4, 6), window=2, every=2)
    cell = Cell(tasks.MLP_DATA, "2-tied", seed=1)
    (seen,) = watched.convergence([cell], [MADE_UP], settings, None)
    (shorter,) = watched.convergence([cell], [MADE_UP], replace(settings, marks=(2, 2, 3)), None)
    assert seen.details["curve"]["step"] == [2, 3, 4, 6]
    assert [seen.metrics[f"step_{mark}"] for mark in watched.MARKS] == [3, 4, 6]
    assert all(len(values) == 4 for values in seen.details["mean_stds"].values())
    for name in ("snr", "median_snr", "neg_elbo", "std"):
        assert seen.metrics[f"{name}_first"] == shorter.metrics[f"{name}_third"]
    assert seen.metrics["snr_third"] >= 1.0


def test_every_seed_starts_from_other_standard_deviations():
    regime = replace(SHORT, rank=None)
    starts = []
    for seed in (0, 1):
        objective = next(watched.run(regime, DIGITS.train, seed, 1))
        starts.append(objective.draft.weight_scale("fc2.weight").std.detach())
    assert not torch.allclose(starts[0], starts[1], rtol=0.05)


def test_ratios_of_signal_to_noise_are_those_of_the_footnote():
    gradients = torch.tensor([[1.0, 2.0, 5.0], [3.0, 2.0, 5.0 + 2e-3]])
    # by hand: E[g²] = 5, 4, 25.010002; Var[g] = 1, 0, 1e-6
    seen = watched.signal(gradients.double())
    assert seen["snr"] == pytest.approx((5 + 4 + 25.010002) / (1 + 0 + 1e-6), rel=1e-4)
    assert seen["mean_snr"] == pytest.approx((5 / 1 + 25.010002 / 1e-6) / 2, rel=1e-3)
    assert watched.signal(torch.ones(3, 2))["snr"] == 1.0


def test_the_gradient_of_a_layers_standard_deviations_is_one_vector():
    sizes = {}
    for rank in (None, 2):
        objective = next(watched.run(replace(SHORT, rank=rank), DIGITS.train, 0, 1))
        sizes[rank] = len(watched.scale_gradient(objective.draft, "fc2.weight"))
    assert sizes == {None: 400 * 400, 2: 2 * (400 + 400)}


def test_batches_are_whole_epochs_in_new_orders():
    train = Part(torch.arange(5.0)[:, None], torch.arange(5))
    batches = [batch.targets.tolist() for batch in watched.batches(train, 2, 3, 7)]
    assert [len(batch) for batch in batches] == [2, 2, 1, 2, 2, 1, 2]
    first, second = list(chain(*batches[:3])), list(chain(*batches[3:6]))
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 4]
    assert first != second


def test_heat_maps_keep_entries_and_their_approximation_of_rank_two():
    std = torch.rand(100, 30, 2, 2, generator=torch.Generator().manual_seed(0)) + 1
    kept = {name: torch.tensor(part) for name, part in figure_3.heat_map(std).items()}
    matrix = std.flatten(1).double()
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    best = left[:, :2] * values[:2] @ right[:2]
    assert kept["std"].shape == (64, 64)
    corners = [0, -1]
    torch.testing.assert_close(
        kept["std"][corners][:, corners].double(), matrix[corners][:, corners], rtol=1e-3, atol=0
    )
    product = (kept["left"].mT @ kept["right"]).double()
    torch.testing.assert_close(product[corners][:, corners], best[corners][:, corners], rtol=1e-2, atol=1e-3)


def test_figures_are_drawn_of_what_was_run_alone(tmp_path):
    results = Results(folder=tmp_path)
    spent = Spent(cpu_seconds=1.0, peak_memory_bytes=None, together=(0,))
    made, steps = figure_7.EXPERIMENTS[tasks.LSTM_DATA], [25.0, 50.0]
    for method in trainings.METHODS:
        for seed, shift in ((0, 0.0), (1, 2.0)):
            curve = {"step": steps, "neg_elbo": [4.0 + shift, 1.0 + shift]}
            outcome = Outcome(metrics={}, details={"curve": curve})
            results.write(made, "small", Cell(tasks.LSTM_DATA, method, 0, seed), outcome, spent)
    lenet = figure_3.EXPERIMENTS[tasks.LENET_DATA]
    std = torch.rand(8, 6, generator=torch.Generator().manual_seed(0))
    cell = Cell(f"{tasks.LENET_DATA}-dense-1", "stds")
    results.write(lenet, "small", cell, Outcome(metrics={}, details={"heat_map": figure_3.heat_map(std)}), spent)
    drawn = {number: figure for number, figure in draw.figures(results).items() if figure}
    assert drawn.keys() == {"figure-4", "figure-7"}  # of the LSTM's panel alone, and the first layer's map
    (axis,) = drawn["figure-7"].axes
    assert [line.get_ydata().tolist() for line in axis.lines] == [[5.0, 2.0]] * 4  # means over seeds
    image = drawn["figure-4"].axes[0].images[0].get_array()
    torch.testing.assert_close(torch.tensor(image.data), std.double().mT, rtol=1e-3, atol=0)


def test_the_page_has_what_was_run_and_names_what_was_not(tmp_path):
    results, (two, lenet, _) = Results(folder=tmp_path), table_2.TABLES
    spent = Spent(cpu_seconds=1.0, peak_memory_bytes=None, together=(0,))
    for method, losses in (("1-tied", (3.0, 3.4, 3.2)), ("2-tied", (0.5, 0.6, 0.4))):
        for seed, loss in enumerate(losses):
            judged = {"neg_elbo": loss, "nll": loss / 2, "accuracy": 97.0}
            results.write(
                two.experiment, "paper", Cell(tasks.MLP_DATA, method, 0, seed), Outcome(metrics=judged), spent
            )
    (tmp_path / "figure-7.png").touch()
    text = page.part([two, lenet], results, tmp_path)
    assert "| mnist-mlp | −ELBO | 3.2 ± 0.1 (3.41) | 0.5 ± 0.06 (0.456) |" in text
    assert "3 runs" in text and "2 holds, 2 not run" in text  # rank 3 was not run
    assert "Not run yet: `ktied-table-2-lenet`." in text
    assert text.count("![") == 1 and "pictures/figure-7.png" in text
    target = tmp_path / "page.md"
    target.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n", encoding="utf-8")
    page.write(target, "new")
    assert target.read_text(encoding="utf-8") == f"before\n{page.BEGIN}\nnew\n{page.END}\nafter\n"
    target.write_text("no marks", encoding="utf-8")
    with pytest.raises(StorageError, match="put them back"):
        page.write(target, "new")


def test_one_logit_is_that_of_the_second_class():
    outputs = torch.tensor([[[0.3], [-2.0]]])
    torch.testing.assert_close(trainings.class_logits(outputs).softmax(-1)[..., 1:], outputs.sigmoid())


def test_tasks_hold_rows_out_and_show_them_as_networks_see_them():
    images = tasks.generate_cell(Cell(tasks.LENET_DATA, "mean-field"))
    small = tasks.LeNet(side=16, held_out=2, test_rows=3).rows(images)
    assert [len(part.targets) for part in small if part] == [6, 2, 3]
    assert small.train.inputs[0, 0, 0, 0] == pytest.approx(float(images.train.inputs[0, 0, :2, :2].mean()))
    assert torch.equal(small.validation.targets, images.train.targets[6:])
    assert tasks.ResNet().rows(images).validation is None
    reviews = tasks.generate_cell(Cell(tasks.LSTM_DATA, "mean-field"))
    short = tasks.LSTM(words=40, vocabulary=5000).rows(reviews).train
    raw = reviews.train.inputs[:, 40:]
    assert torch.equal(short.inputs, torch.where(raw < 5000, raw, 2))
    assert short.targets.shape == (64, 1)


def test_the_counts_of_families_are_the_papers_formulas():
    for cell in table_1.EXPERIMENT.scales["paper"].cells:
        settings = table_1.EXPERIMENT.settings("paper", cell)
        (outcome,) = table_1.counted([cell], [table_1.shape(cell)], settings, None)
        published = tables()["ktied-table-1"].published[cell.data, cell.method, "parameters"]
        assert outcome.metrics["parameters"] == published.value
    # written out for 784 × 400: mn = 313,600
    assert table_1.formula("2-tied", 784, 400) == 313_600 + 2 * 1184
    assert table_1.formula("matrix", 784, 400) == 313_600 + 307_720 + 80_200


def test_truncation_says_how_much_fell_below_the_floor():
    cell = Cell(tasks.MLP_DATA, "1-tied")
    settings = table_2.Truncation(rank=1, floor=0.0101, regime=SHORT)
    (found,) = table_2.truncated([cell], [MADE_UP], settings, 2)
    posterior = trainings.trained(SHORT, DIGITS, 0, 2)
    left, values, right = torch.linalg.svd(posterior.weight_scale("fc2.weight").std.double())
    best = values[0] * left[:, :1] @ right[:1]
    share = float((best < 0.0101).double().mean())
    assert 0.1 < share < 0.9
    assert found.details["share_below_floor"]["dense-2"] == pytest.approx(share, abs=1e-3)
    assert found.metrics["parameters"] == 481_614


def test_counts_are_the_papers_integers():
    published = tables()["ktied-table-5"].published
    for method, rank in trainings.RANKS.items():
        cell = Cell("tfp_resnet18", method)
        (outcome,) = tables_4_5.counted([cell], [tables_4_5.build(cell)], tables_4_5.Count(rank=rank), None)
        assert outcome.metrics["parameters"] == published["tfp_resnet18", method, "parameters"].value


def test_numbers_of_the_paper():
    two, left = tables()["ktied-table-2"].published, tables()["ktied-figure-6-left"].published
    assert two["mnist-mlp", "1-tied", "neg_elbo"].value == 3.41
    assert tables()["ktied-table-2-lstm"].published["imdb-lstm", "3-tied", "nll"].error == 0.0056
    assert left["mnist-mlp", "3-tied", "nll"].value == 0.120
    assert tables()["ktied-figure-6-left-lenet"].published == {}  # CIFAR-10 in place of CIFAR-100
    assert left["mnist-mlp", "2-tied", "thousand_parameters"].error is None
    assert {number.over for key, number in left.items() if key[2] == "nll"} == {Over.EXAMPLES}
    right = tables()["ktied-figure-6-right"].published
    assert right["mnist-mlp", "2-tied", "snr_first"].value == 7500
    assert right["mnist-mlp", "mean-field", "neg_elbo_third"].error == 0.016
    assert {number.over for number in right.values()} == {Over.RUNS}
    three = tables()["ktied-table-3"].published
    assert three["cifar10-resnet", "1-tied", "ece"].value == 0.1642
    assert three["cifar10-resnet-he", "1-tied", "nll"].value == 1.485
    # the binomial's standard error over 10,000 images, not one over 100 draws; accuracies are printed rounded
    for method, accuracy in (("mean-field", 0.976), ("1-tied", 0.936)):
        error = 100 * (accuracy * (1 - accuracy) / 10_000) ** 0.5
        assert two["mnist-mlp", method, "accuracy"].error == pytest.approx(error, abs=0.006)


def test_only_what_the_papers_numbers_say_of_ranks_is_claimed():
    cut = {table.name: {(claim.better, claim.metric) for claim in table.claims} for table in table_2.TABLES}
    assert cut["ktied-table-2-lenet"] == {(f"{k}-tied", metric) for k in (2, 3) for metric in ("neg_elbo", "nll")}
    assert cut["ktied-table-2-lstm"] == {("2-tied", "neg_elbo"), ("3-tied", "neg_elbo")}  # NLL .494 and .493 for .491
    trained = {table.name: table.claims for table in figure_6.TABLES}
    assert not trained["ktied-figure-6-left-lenet"]  # −ELBO 3.65 at rank 1, 3.76 and 3.73 at 2 and 3

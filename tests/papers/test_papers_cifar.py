"""The reduced CIFAR-10 that tables of rank-1 and implicit networks share, against plain sums."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dubito import MAP, DeepEnsemble, Implicit, MCDropout, MeanField, Rank1
from dubito.data import Part
from dubito.training.steps import GradientStepper
from papers.__main__ import main
from papers.cifar import fits, images, scores
from papers.cifar.cells import Judged, run_cell
from papers.cifar.fits import Fit
from papers.implicit import table_1
from papers.rank1 import ablations
from papers.rank1 import draw as rank1_draw
from papers.runner.experiment import Cell
from papers.runner.first_cells import runs_by_method
from papers.runner.store import Results, Spent
from papers.runner.tables import tables
from papers.settings import explicit


def test_augmented_images_are_shifts_of_the_image_or_its_mirror():
    picture = torch.arange(1.0, 1 + 3 * 6 * 6).reshape(1, 3, 6, 6).repeat(64, 1, 1, 1)
    torch.manual_seed(0)
    result = images.augmented(picture)
    wide = torch.nn.functional.pad(picture[0], (2,) * 4)
    shifts = [wide[:, top : top + 6, left : left + 6] for top in range(5) for left in range(5)]
    mirrored = [
        torch.nn.functional.pad(picture[0].flip(-1), (2,) * 4)[:, top : top + 6, left : left + 6]
        for top in range(5)
        for left in range(5)
    ]
    kinds = [
        next(number for number, other in enumerate(shifts + mirrored) if torch.equal(image, other)) for image in result
    ]
    assert len(set(kinds)) > 25  # of 50
    assert 16 < sum(kind >= 25 for kind in kinds) < 48


def test_images_keep_their_labels_when_they_are_read_in_batches():
    part = Part(torch.arange(10.0)[:, None, None, None].expand(10, 3, 8, 8), torch.arange(10))
    inputs, labels = next(iter(images.Augmented(part).loader(4)))
    assert inputs.shape == (4, 3, 8, 8)
    assert torch.equal(inputs.amax((1, 2, 3)).long(), labels)


def test_pooling_is_the_mean_of_four_pixels_and_scaling_that_of_the_channel():
    pixels = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    pixels[0, 1, :2, :2] = torch.tensor([[10, 20], [30, 40]])
    result = images.standardised(pixels, 2)
    assert float(result[0, 1, 0, 0]) == pytest.approx((25 / 255 - images.MEAN[1]) / images.STD[1], rel=1e-6)
    assert float(result[0, 0, 1, 1]) == pytest.approx(-images.MEAN[0] / images.STD[0], rel=1e-6)


def draws() -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(6, 40, 10, generator=stream, dtype=torch.float64)
    return logits.log_softmax(-1), torch.randint(10, (40,), generator=stream)


def test_metrics_by_number_of_components_are_those_of_their_draws():
    logs, labels = draws()
    result = scores.by_number(logs, labels, 3)
    probs = logs.exp()
    for count, owners in ((1, [0, 3]), (2, [0, 1, 3, 4]), (3, list(range(6)))):
        expected = -probs[owners].mean(0)[torch.arange(40), labels].log().mean()
        assert result["nll"][count - 1] == pytest.approx(float(expected), rel=1e-9)
    alone = -probs[[1, 4]].mean(0)[torch.arange(40), labels].log().mean()
    assert result["nll_alone"][1] == pytest.approx(float(alone), rel=1e-9)


def test_disagreement_is_the_share_of_differing_pairs_over_the_error():
    logs, labels = draws()
    classes = [logs[[k, k + 3]].exp().mean(0).argmax(-1).tolist() for k in range(3)]
    truth = labels.tolist()
    apart = [sum(a != b for a, b in zip(classes[i], classes[j], strict=True)) / 40 for i, j in ((0, 1), (0, 2), (1, 2))]
    errors = [sum(a != b for a, b in zip(named, truth, strict=True)) / 40 for named in classes]
    assert scores.disagreement(logs, labels, 3) == pytest.approx(sum(apart) / sum(errors), rel=1e-9)


def test_severities_are_means_over_corruptions():
    row = dict.fromkeys(scores.MEASURES, 1.0)
    results = {("fog", 1): row, ("snow", 1): dict.fromkeys(scores.MEASURES, 3.0), ("fog", 5): row}
    assert scores.severities(results) == {name: [2.0, 1.0] for name in scores.MEASURES}


def test_the_area_is_one_where_foreign_images_have_flat_probabilities():
    certain, flat = torch.full((5, 10), -40.0).log_softmax(-1), torch.zeros(5, 10).log_softmax(-1)
    certain = certain + torch.nn.functional.one_hot(torch.arange(5), 10) * 60
    assert scores.area(scores.entropy(certain.log_softmax(-1)), scores.entropy(flat)) == 1.0
    assert float(scores.entropy(flat)[0]) == pytest.approx(math.log(10), rel=1e-6)


@pytest.fixture
def tiny() -> Fit:
    return Fit(method=explicit(MAP), base=4, epochs=1, num_images=16, batch_size=8)


def test_an_ensemble_is_made_of_the_seeds_own_plain_run_and_further_ones(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(fits, "trained_at", lambda *key: tmp_path / f"{key[3]}.safetensors")
    seen = images.pictures(images.generate_cell(Cell(fits.DATA, "")), 8)
    point, seconds = fits.trained(tiny, seen, 1, None)
    members, all_seconds = fits.trained(replace(tiny, method=explicit(DeepEnsemble, members=3)), seen, 1, None)
    first = scores.log_probs(point, seen.test.inputs, 1, 0)
    assert torch.allclose(scores.log_probs(members, seen.test.inputs, 3, 0)[0], first[0])
    assert {path.stem for path in tmp_path.glob("*.safetensors")} == {"1", "102", "103"}
    assert all_seconds > seconds


def test_a_whole_training_is_found_again(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(fits, "trained_at", lambda *key: tmp_path / "fit.safetensors")
    seen = images.pictures(images.generate_cell(Cell(fits.DATA, "")), 8)
    first, _ = fits.trained(tiny, seen, 0, None)
    monkeypatch.setattr(GradientStepper, "step", lambda *step: pytest.fail("trained again"))
    again, _ = fits.trained(tiny, seen, 0, None)
    assert torch.equal(*(scores.log_probs(posterior, seen.test.inputs, 1, 0) for posterior in (first, again)))


def test_validation_images_are_learned_only_where_all_images_are_asked_for():
    seen = images.pictures(images.generate_cell(Cell(fits.DATA, "")), 8)
    few, rows = fits.learned(seen, 20), len(seen.train.targets)
    assert torch.equal(few.inputs, seen.train.inputs[:20])
    assert torch.equal(fits.learned(seen, rows).targets, seen.train.targets)
    assert torch.equal(fits.learned(seen, rows + 3).inputs[rows:], seen.validation.inputs[:3])


def test_standard_deviations_start_where_the_method_says():
    assert fits.first_std(explicit(MCDropout)) is None
    assert fits.first_std(explicit(Implicit, initial_std=0.2)) == 0.2
    assert fits.first_std(explicit(Rank1, initial_rate=0.2)) == pytest.approx(0.5)


def test_the_median_of_standard_deviations_is_over_all_of_them():
    values = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 9.0, 9.0]])]
    posterior = SimpleNamespace(method=explicit(Rank1), standard_deviations=lambda: values)
    assert fits.last_std(posterior) == 3.0  # pyright: ignore[reportArgumentType]


def test_a_cell_holds_what_tables_and_figures_read(tiny):
    cell = Cell(fits.DATA, "rank1")
    settings = Judged(fit=replace(tiny, method=explicit(Rank1, components=2)))
    outcome = run_cell(cell, images.generate_cell(cell), settings, 2)
    assert {"nll", "c_nll", "auroc", "bytes", "seconds", "diversity"} <= set(outcome.metrics)
    assert outcome.details["first_std"] == pytest.approx(0.0316, rel=1e-2)
    assert len(outcome.details["components"]["nll"]) == 2
    assert len(outcome.details["severities"]["nll"]) == 2


def test_corrupted_images_are_judged_where_they_are_asked_for(tiny):
    cell = Cell(fits.DATA, "plain")
    outcome = run_cell(cell, images.generate_cell(cell), Judged(fit=tiny, num_samples=1, shifted=False), 2)
    assert "nll" in outcome.metrics and "auroc" in outcome.metrics
    assert not any(name.startswith("c_") for name in outcome.metrics)
    assert not outcome.details["corruptions"]


def test_a_mean_field_of_kernels_leaves_biases_and_batch_norm_points(tiny):
    seen = images.pictures(images.generate_cell(Cell(fits.DATA, "")), 8)
    fit = replace(tiny, method=explicit(MeanField), kernels=True)
    posterior, _ = fits.trained(fit, seen, 0, 2)
    sizes = {name: weight.numel() for name, weight in posterior.network.named_parameters() if weight.ndim > 1}
    assert sum(std.numel() for std in posterior.standard_deviations()) == sum(sizes.values())
    assert not fit.plain.kernels


def test_a_run_is_watched_epoch_by_epoch_and_ends_where_the_posterior_is(tiny, monkeypatch):
    monkeypatch.setattr(ablations, "WATCHED", 24)
    seen = images.pictures(images.generate_cell(Cell(fits.DATA, "")), 8)
    trail = ablations.Trail(seen, 4, 2)
    method = explicit(Rank1, components=2)
    fit = replace(tiny, method=trail.watching(method), epochs=3)
    posterior, _ = fits.trained(fit, seen, 0, None, stored=False, callbacks=[trail])
    assert [len(values) for values in trail.steps.values()] == [3, 3, 3, 3]
    draws = scores.log_probs(posterior, seen.test.inputs, 4, 0)
    last = scores.measured(scores.mixed(draws), seen.test.targets)
    assert trail.steps["nll"][-1] == pytest.approx(last["nll"], rel=1e-5)
    assert trail.steps["nll"][0] != trail.steps["nll"][-1]
    assert trail.steps["diversity"][-1] == pytest.approx(scores.disagreement(draws, seen.test.targets, 2))


def test_tiles_hold_as_many_rows_whatever_the_components():
    for count in ablations.COMPONENTS:
        fit = ablations.SETTINGS[f"k-{count}"].fit
        assert fit.batch_size * fit.method.components == 512  # pyright: ignore[reportAttributeAccessIssue]
        assert fit.lr / fit.batch_size == pytest.approx(0.2 / 128)
        assert fit.variational_lr == 2.0


def test_induced_weights_have_the_variances_of_their_laws():
    made = rank1_draw.induced(1_000_000)
    assert float(made["r = 1"].var()) == pytest.approx(1.0, rel=0.02)
    assert float(made["Normal r"].var()) == pytest.approx(2.0, rel=0.02)  # E r² = 1 + 1
    assert float(made["inverse-gamma r²"].var()) == pytest.approx(1.5, rel=0.05)  # Student's t of 6: 6 / 4
    # Half of the draws of a Cauchy lie within 1 of its middle.
    halves = ((made["Cauchy r"] / made["r = 1"] - 1).abs() < 1).double().mean()
    assert float(halves) == pytest.approx(0.5, abs=0.01)


def test_pictures_are_drawn_from_what_is_there(tmp_path):
    results = Results(folder=tmp_path)
    for name, methods in (
        ("rank1-cifar10", ("deterministic", "batch-ensemble")),
        ("implicit-cifar10", ("sgd", "implicit-4")),
        ("rank1-ablations", ("both", "batch-ensemble", "log-mixture")),
    ):
        made = tables()[name].experiment
        for cell in (Cell(fits.DATA, method, 0, seed) for method in methods for seed in range(2)):
            settings = made.settings("small", cell)
            (outcome,) = made.run([cell], [made.generate(cell)], settings, 2)
            results.write(made, "small", cell, outcome, Spent(cpu_seconds=1.0, peak_memory_bytes=None, together=(0,)))
    assert main(["pictures", "--results", str(tmp_path)]) == 0
    drawn = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/pictures/*")}
    assert drawn == {
        *(f"rank1/pictures/figure-{number}.png" for number in (1, 4, 5, 7)),
        *(f"implicit/pictures/figure-{number}.png" for number in (6, 7)),
        "bali/pictures/costs.png",  # of measured times, which lie beside the code
        "inf/pictures/cost.png",
    }
    assert [len(runs) for runs in runs_by_method("rank1-cifar10", results).values()] == [2, 2]


def test_nodes_are_the_inputs_of_layers():
    assert table_1.nodes(torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Linear(7, 2))) == 10
    assert table_1.nodes(table_1.build(Cell("alexnet", "counted"))) == 18_307
    assert table_1.nodes(table_1.build(Cell("vgg16-large", "counted"))) == 36_995

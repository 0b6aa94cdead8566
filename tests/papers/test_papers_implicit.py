"""The implicit paper's figures: planes against closed forms, draws against brute force, shared trainings."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dubito import DeepEnsemble, Implicit
from dubito.data import Part
from papers.implicit import fashion, figure_1, figure_2, figure_3, figures_4_8
from papers.implicit.fashion import Fit, Judged
from papers.runner import tables
from papers.runner.experiment import Cell

CELL = Cell(fashion.DATA, "implicit")
CLOTHES = fashion.generate_cell(CELL)
SHORT = Fit(method=Implicit(components=3, mean_std=0.75), epochs=1, kl_warmup=0.0)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def posterior():
    return fashion.trained(SHORT, CLOTHES, 0, steps=2)


def test_a_plane_holds_points_of_two_dimensions_and_is_numpys():
    flat = normal(6, 2) @ normal(2, 9, seed=1) + normal(9, seed=2)
    plane = figure_2.Plane.through(flat)
    torch.testing.assert_close(plane.lift(plane.project(flat)), flat)
    torch.testing.assert_close(plane.axes @ plane.axes.mT, torch.eye(2).double())
    assert plane.explained == pytest.approx(1)
    points = normal(5, 9)
    variances = torch.linalg.eigvalsh(torch.cov(points.mT)).flip(0)
    assert figure_2.Plane.through(points).explained == pytest.approx(float(variances[:2].sum() / variances.sum()))


def test_a_convex_loss_has_no_barrier_and_a_fold_has_its_height():
    part = Part(normal(20, 4).float(), torch.arange(20) % 3)
    line = nn.Linear(4, 3)
    assert figure_2.barrier(line, normal(3, 15).float(), part, 5) == pytest.approx(0, abs=1e-6)

    class Square(nn.Module):
        """Class 0 has the logit w²: between w = −1 and 1 it is lost."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.weight.square().expand(len(inputs)), torch.zeros(len(inputs))], 1)

    ends = torch.tensor([[-1.0], [1.0]])
    always = Part(torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64))
    # −log σ(w²) is log 2 in the middle and log(1 + 1/e) at both ends
    height = torch.tensor(2.0).log() - torch.tensor(-1.0).exp().log1p()
    assert figure_2.barrier(Square(), ends, always, 3) == pytest.approx(float(height), rel=1e-5)


def test_component_weights_are_the_products_of_weights_and_mean_factors(posterior):
    points, centre = figure_2.component_weights(posterior)
    own = posterior.weights()
    start = 0
    for name, weight in own.items():
        part = points[:, start : start + weight.numel()].view(3, *weight.shape)
        start += weight.numel()
        factors = torch.ones(3, *(1 for _ in weight.shape))
        if name.endswith("weight"):  # a column, or an input channel, has a factor
            factors = posterior.group("input_mean")[name].view(3, 1, -1, *(1 for _ in weight.shape[2:]))
        torch.testing.assert_close(part, weight * factors)
    assert start == len(centre)
    torch.testing.assert_close(centre, torch.cat([weight.flatten() for weight in own.values()]))


def test_members_of_an_ensemble_lie_around_their_mean():
    ensemble = fashion.trained(replace(SHORT, method=DeepEnsemble(members=2)), CLOTHES, 0, steps=1)
    points, centre = figure_2.component_weights(ensemble)
    torch.testing.assert_close(centre, (points[0] + points[1]) / 2)
    assert not torch.equal(points[0], points[1])


def test_surfaces_are_the_losses_of_networks_at_their_places(posterior):
    settings = figure_2.Surface(fit=SHORT, num_seen=20, num_samples=2)
    outcome = figure_2.run_plane(CELL, CLOTHES, settings, 2)
    found = outcome.details
    points, centre = figure_2.component_weights(posterior)
    plane = figure_2.Plane.through(points)
    place = torch.tensor([found["x"][1], found["y"][0]])
    figure_2.vector_to_parameters(plane.lift(place), (net := posterior.fold()).parameters())
    logits = net(CLOTHES.test.inputs[:20]).detach()
    labels = CLOTHES.test.targets[:20]
    assert found["test_nll"][1][0] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-2)
    for name in ("train_nll", "train_accuracy", "test_nll", "test_accuracy"):
        assert torch.tensor(found[name]).shape == (2, 2)
    coordinates = torch.tensor([*found["components"], found["centre"]])
    assert float(coordinates.mean(0)[0]) >= min(found["x"]) and coordinates.shape == (4, 2)
    with torch.no_grad():
        whole = F.cross_entropy(posterior.network(CLOTHES.test.inputs), CLOTHES.test.targets)
    assert outcome.metrics["centre_nll"] == pytest.approx(float(whole), rel=1e-5)
    spread = (points - centre).norm(dim=1).mean() / centre.norm()
    assert outcome.metrics["spread"] == pytest.approx(float(spread), rel=1e-5)


def test_disagreement_is_the_share_of_draws_outside_the_majority():
    classes = torch.tensor([[0, 1], [0, 1], [2, 1], [0, 1]])
    probs = F.one_hot(classes, 3).double()
    assert figure_3.disagreement(probs).tolist() == [0.25, 0.0]


def test_extremes_are_the_images_of_highest_and_lowest_entropy(posterior):
    labels = CLOTHES.test.targets
    doubt = posterior.predict(CLOTHES.test.inputs, 2, seed=0).total.tolist()
    settings = Judged(fit=SHORT, num_samples=3)
    ends = {}
    for end, chosen in (("lowest", min), ("highest", max)):
        cell = Cell(fashion.DATA, end)
        found = figure_3.run_extremes(cell, CLOTHES, settings, 2)
        ends[end] = found.metrics
        for label, image in enumerate(found.details["images"]):
            rows = [row for row in range(len(labels)) if labels[row] == label]
            assert image == chosen(rows, key=doubt.__getitem__)
        draws = torch.tensor(found.details["probs"])
        assert draws.shape == (4, 2, 10)
        torch.testing.assert_close(draws.sum(-1), torch.ones(4, 2), atol=6e-3, rtol=0)
    # There are 4 of a class, all taken.
    assert ends["highest"]["total"] == pytest.approx(ends["lowest"]["total"])


def test_curves_of_doubt_add_up_and_start_at_the_images_as_they_are(posterior):
    cell = Cell("salt-and-pepper", "implicit")
    found = figures_4_8.run_noise(cell, CLOTHES, Judged(fit=SHORT), 2)
    curves = {name: torch.tensor(found.details[name]) for name in figures_4_8.DOUBTS}
    torch.testing.assert_close(curves["total"], curves["aleatoric"] + curves["epistemic"])
    clean = posterior.predict(CLOTHES.test.inputs, 2, seed=0).total
    assert found.metrics["clean"] == pytest.approx(float(clean.mean()), rel=1e-5)
    steps = curves["total"].diff()
    assert found.metrics["least_rise"] == pytest.approx(float(steps.min()), abs=1e-6)
    assert found.metrics["rise"] == pytest.approx(float(steps.sum()), abs=1e-6)
    assert found.metrics["share"] == pytest.approx(float(curves["epistemic"].sum() / curves["total"].sum()), rel=1e-5)


def test_sizes_are_the_figures():
    made = tables()["implicit-figure-4"].experiment.scales["paper"]
    sizes = []
    for width in figures_4_8.WIDTHS:
        settings = made.variants[fashion.DATA, f"mean-field-{width}"].settings
        outcome = figures_4_8.run_width(CELL, CLOTHES, replace(settings, num_test=4), 1)
        sizes.append(round(outcome.details["network_parameters"] / 1000))
    assert sizes == [42, 165, 657, 2619]


def test_a_whole_training_serves_all_figures(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("papers.runner.trained.cache_folder", lambda: tmp_path / "data")
    first = fashion.trained(SHORT, CLOTHES, 0, None)
    monkeypatch.setattr("dubito.training.steps.GradientStepper.step", lambda *_: pytest.fail("trained again"))
    again = fashion.trained(SHORT, CLOTHES, 0, None)
    for name, tensor in first.stored().items():
        assert torch.equal(tensor, again.stored()[name])
    assert len(list((tmp_path / "trained").iterdir())) == 1


def test_the_small_scale_differs_as_it_says():
    for name in ("implicit-figure-2", "implicit-figure-3", "implicit-figure-4", "implicit-figure-8"):
        scales = tables()[name].experiment.scales
        for key, variant in scales["small"].variants.items():
            large, small = scales["paper"].variants[key].settings, variant.settings
            widths = name == "implicit-figure-4"
            assert (large.fit.num_images, small.fit.num_images) == (50_000, 50_000 if widths else 10_000)
            assert (large.fit.epochs, small.fit.epochs) == (300, 5 if widths else 10)
            assert (large.num_test, small.num_test) == (10_000, 10_000 if widths else 2_000)
            if isinstance(large.fit.method, Implicit):
                assert (large.fit.method.noise_samples, small.fit.method.noise_samples) == (2, 1)


def test_the_cubics_numbers_are_in_original_units():
    cell = Cell(figure_1.DATA, "implicit")
    points = figure_1.generate_cell(cell)
    settings = figure_1.Fit(method=figure_1.METHODS["implicit"], depths=(1, 3), hidden=8)
    (found,) = figure_1.run_cells([cell], [points], settings, 2)
    seed = figure_1.seeds.derived(0, 0)
    posterior = figure_1.trained(points, settings, 3, seed, 2)
    outputs = posterior.sample_outputs(points.test.inputs, 4, seed=seed)  # two draws are rounded up to K
    errors = 20 * (outputs.mean(0) - points.test.targets)
    assert found.metrics["rmse_3"] == pytest.approx(float(errors.square().mean().sqrt()), rel=1e-5)
    noise = torch.distributions.Normal(20 * outputs.double(), figure_1.NOISE)
    density = noise.log_prob(20 * points.test.targets.double()).logsumexp(0) - torch.tensor(4.0).log()
    assert found.metrics["nll_3"] == pytest.approx(-float(density.mean()), rel=1e-5)
    assert found.metrics["rise"] == pytest.approx(found.metrics["nll_3"] - found.metrics["nll_1"])
    assert len(found.details["3"]["mean"]) == len(figure_1.PLACES)

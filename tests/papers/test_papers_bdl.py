"""The HMC references: networks against hand counts and plain formulas, rows in step, cells on made-up rows, IVON."""

import math
import sys
import warnings
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dubito import Categorical, Diagonal, Laplace
from dubito.data import Part
from dubito.data.locate import folders
from dubito.data.readers import arrays
from dubito.errors import ConfigError, DataError, DubitoWarning
from papers.references import bdl_cifar10, bdl_imdb, ivon
from papers.references.bdl import PICTURES, PROBS, Ground, probabilities, reviews, scores
from papers.references.bdl_fits import REFERENCE, SHIPPED
from papers.references.bdl_networks import FilterResponseNorm, Layer, image_network, text_network
from papers.runner.experiment import Cell
from papers.runner.scores import unpacked


def here(name: str) -> bool:
    return any((folder / name).is_file() for folder in folders())


needs_reviews = pytest.mark.skipif(not here("hmc/imdb.npz"), reason="hmc/imdb.npz is not in DUBITO_DATA")
needs_pictures = pytest.mark.skipif(
    not (here("hmc/cifar10_probs.npz") and here("cifar10_test.npz")),
    reason="CIFAR-10's test images and their reference are not in DUBITO_DATA",
)
needs_ivon = pytest.mark.skipif(find_spec("ivon") is None, reason="ivon-opt is not installed")


# -- networks ---------------------------------------------------------------------------------------------------


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_the_text_network_has_the_references_weights():
    network = text_network()
    parts = {name: count(part) for name, part in network.named_children()}
    assert parts == {
        "embedding": 20_000 * 128,
        "conv": 128 * 5 * 64 + 64,
        "pool": 0,
        "lstm": 4 * 128 * (64 + 128 + 1),  # haiku's: one bias
        "fc": 128 * 2 + 2,
    }
    assert count(network) == 2_700_098
    assert network(torch.zeros(3, 100, dtype=torch.long)).shape == (3, 2)


def test_the_text_networks_steps_are_the_references():
    network, words = text_network(vocabulary=30, embedding=3, filters=4, hidden=5), torch.arange(26)[None] % 7
    vectors = network.embedding.weight[words[0]]  # [26, 3]
    windows = torch.stack([vectors[start : start + 5].T for start in range(22)])  # without padding
    features = torch.einsum("tci,fci->tf", windows, network.conv.weight) + network.conv.bias
    pooled = features.relu()[:20].reshape(5, 4, 4).amax(1)  # a rest of two is left out
    lstm, state, cell = network.lstm, torch.zeros(5), torch.zeros(5)
    weights = lstm.get_parameter("weight_ih_l0"), lstm.get_parameter("weight_hh_l0")
    for step in pooled:
        gates = weights[0] @ step + weights[1] @ state + lstm.get_parameter("bias_ih_l0")
        i, f, g, o = gates.chunk(4)
        cell = (f + 1).sigmoid() * cell + i.sigmoid() * g.tanh()  # haiku adds 1 outside of the weights
        state = o.sigmoid() * cell.tanh()
    torch.testing.assert_close(network(words)[0], network.fc(state))


def test_the_image_network_has_the_references_weights():
    network = image_network()
    stages = {16: (16, 7, 0), 32: (16, 7, 1), 64: (32, 7, 1)}
    convolutions = 3 * 16 * 9 + 16
    for width, (before, _, projected) in stages.items():
        convolutions += before * width * 9 + width + 5 * (width * width * 9 + width)
        convolutions += projected * (before * width + width)
    norms = 3 * sum(width * layers for width, (_, layers, _) in zip(stages, stages.values(), strict=True))
    # The stem belongs to the first stage's norms, a projection's norm to those of its stage.
    assert count(network) == convolutions + norms + 64 * 10 + 10 == 274_042
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_filter_response_norm_is_its_formula():
    norm, maps = FilterResponseNorm(3), torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        norm.gamma.copy_(torch.tensor([1.0, 2.0, -1.0]))
        norm.beta.copy_(torch.tensor([0.0, 0.5, 1.0]))
        norm.tau.copy_(torch.tensor([-0.5, 0.0, 9.0]))
    norm.requires_grad_(False)
    for channel in range(3):
        for row in range(2):
            plane = maps[row, channel]
            scaled = plane / (plane.square().sum() / 20 + 1e-6).sqrt()
            expected = (norm.gamma[channel] * scaled + norm.beta[channel]).clamp(min=float(norm.tau[channel]))
            torch.testing.assert_close(norm(maps)[row, channel], expected)


def test_laplace_reads_all_of_the_image_network_but_its_thresholds():
    network, images = image_network(depth=8, base=2), torch.randn(8, 3, 8, 8)
    method = Laplace(structure=Diagonal(), prior_precision=5.0)
    with warnings.catch_warnings():  # an untrained network rightly makes it warn
        warnings.simplefilter("ignore", DubitoWarning)
        points = method.fit(network, (images, torch.arange(8)), Categorical()).details["points"]
    assert points.keys() == {name for name, _ in network.named_parameters() if name.endswith("tau")}


def test_a_stride_of_two_pads_behind_the_image_as_tensorflow_does():
    layer, image = Layer(1, 1, 3, 2), torch.arange(16.0).reshape(1, 1, 4, 4)
    padded = torch.zeros(5, 5)
    padded[:4, :4] = image[0, 0]
    corner = (layer.conv.weight[0, 0] * padded[2:5, 2:5]).sum() + layer.conv.bias
    seen = layer.conv(F.pad(image, layer.behind or ()))
    assert seen.shape == (1, 1, 2, 2)
    torch.testing.assert_close(seen[0, 0, 1, 1], corner[0])


# -- rows -------------------------------------------------------------------------------------------------------


def test_test_rows_are_chosen_evenly_and_stay_in_step_with_the_reference():
    numbers = torch.arange(25)
    part = Part(numbers, numbers)
    ground = Ground(part, part, part, numbers[:, None].float(), nn.Identity()).cut(3, 2, 5)
    assert ground.test.inputs.tolist() == ground.reference[:, 0].tolist() == [0, 5, 10, 15, 20]
    assert (len(ground.train.targets), len(ground.validation.targets)) == (3, 2)
    assert len(ground.cut(9, 9, 99).test.targets) == 5


def test_scores_are_those_of_plain_sums():
    probs = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.3, 0.7]], dtype=torch.float64)
    reference = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.1, 0.9]])
    part = Part(torch.zeros(3), torch.tensor([0, 1, 0]))
    values, facts = scores(probs, Ground(part, part, part, reference, nn.Identity()))
    assert values["agreement"] == pytest.approx(200 / 3)
    assert values["total_variation"] == pytest.approx((0.1 + 0.2 + 0.2) / 3, abs=1e-6)
    assert values["accuracy"] == pytest.approx(200 / 3)
    assert values["nll"] == pytest.approx(-math.log(0.8 * 0.6 * 0.3) / 3)
    assert unpacked(facts["total_variations"]).tolist() == pytest.approx([0.1, 0.2, 0.2], abs=1e-3)


def test_data_that_are_not_there_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reviews.cache_clear()
    with pytest.raises(DataError, match=r"hmc/imdb\.npz"):
        reviews()


@needs_reviews
def test_a_network_of_brief_training_agrees_with_the_references_rows():
    train, rest, test, reference = reviews()
    assert (len(train.targets), int(train.targets.sum()), len(rest.targets)) == (20_000, 10_031, 5000)
    right = (reference.argmax(1) == test.targets).double().mean()
    assert float(right) == pytest.approx(0.8756, abs=5e-5)
    # Words of a review counted by a table of one number each: a network that is trained in a second.
    bag = nn.Sequential(nn.EmbeddingBag(20_000, 2, mode="mean", padding_idx=0))
    nn.init.zeros_(bag[0].weight)
    optimizer = torch.optim.Adam(bag.parameters(), lr=0.5)
    for rows in torch.arange(20_000).split(1000) * 2:
        optimizer.zero_grad()
        F.cross_entropy(bag(train.inputs[rows]), train.targets[rows]).backward()
        optimizer.step()
    labels = bag(test.inputs[:5000]).argmax(1)
    agreement = (labels == reference[:5000].argmax(1)).double().mean()
    shifted = (labels == reference[1:5001].argmax(1)).double().mean()
    assert agreement > 0.8 and abs(shifted - 0.5) < 0.05


@needs_pictures
def test_the_reference_of_the_images_is_in_their_order():
    folder = next(folder for folder in folders() if (folder / PROBS.path).is_file())
    labels = torch.from_numpy(arrays(folder / PICTURES[2].path)["y"]).long()
    right = (probabilities(PROBS, "probs", (10_000, 10)).argmax(1) == labels).double().mean()
    assert float(right) == pytest.approx(0.9144, abs=5e-5)


# -- cells ------------------------------------------------------------------------------------------------------


def rehearsed(experiment, scale, cell):
    with warnings.catch_warnings():  # networks after two steps rightly make some methods warn
        warnings.simplefilter("ignore", DubitoWarning)
        (outcome,) = experiment.run([cell], [experiment.generate(cell)], experiment.settings(scale, cell), 2)
    assert {metric.name for metric in bdl_imdb.METRICS} <= outcome.metrics.keys()
    assert all(math.isfinite(value) for value in outcome.metrics.values())
    assert 0 <= outcome.metrics["total_variation"] <= 1 and outcome.metrics["bytes"] > 1000
    return outcome


@pytest.mark.parametrize("method", [name for name in bdl_imdb.PLAN.methods() if name != "ivon"])
def test_every_method_runs_as_the_references_posterior(method):
    rehearsed(bdl_imdb.EXPERIMENT, "paper", Cell(REFERENCE, method))


@pytest.mark.parametrize("method", ["map", "mean-field", "laplace-kfac", "rank1"])
def test_methods_run_as_shipped(method):
    outcome = rehearsed(bdl_imdb.EXPERIMENT, "small", Cell(SHIPPED, method))
    assert outcome.details["protocol"]["rows"] == 50


@pytest.mark.parametrize("method", bdl_cifar10.SECONDS)
@pytest.mark.parametrize("scale", bdl_cifar10.EXPERIMENT.scales)
def test_every_method_runs_on_images(method, scale):
    rehearsed(bdl_cifar10.EXPERIMENT, scale, Cell(REFERENCE, method))


def test_the_references_prior_is_in_every_method_and_nothing_tempers_it():
    for name, fit in bdl_imdb.PLAN.methods().items():
        method, training = fit.method, fit.training
        if name.startswith("laplace"):
            prior = method.prior_precision**-0.5
        elif name in ("batch-ensemble", "rank1", "implicit"):
            prior = (20_000 * training.weight_decay) ** -0.5
        else:
            prior = method.prior_std
        assert prior == pytest.approx(40**-0.5), name
        assert getattr(method, "kl_weight", 1.0) == getattr(method, "scale", 1.0) == 1.0
        assert training is None or (training.kl.weight == 1 and training.early_stopping is None)


def test_ten_methods_have_three_seeds_and_as_shipped_one():
    cells = bdl_imdb.EXPERIMENT.scales["paper"].cells
    by_row = {row: [cell for cell in cells if cell.data == row] for row in (REFERENCE, SHIPPED)}
    assert len({cell.method for cell in by_row[REFERENCE]}) >= 10
    assert {cell.split for cell in by_row[REFERENCE]} == {0, 1, 2}
    assert {cell.split for cell in by_row[SHIPPED]} == {0}
    assert "ivon" in {cell.method for cell in by_row[REFERENCE]}


def test_methods_that_share_a_map_fit_have_its_seconds():
    cells = [Cell(REFERENCE, name, split=7) for name in ("map", "laplace-diag")]
    first, second = (rehearsed(bdl_imdb.EXPERIMENT, "paper", cell) for cell in cells)
    assert second.metrics["seconds"] > first.metrics["seconds"] > 0


@pytest.mark.parametrize("method", ["mean-field", "deep-ensemble"])
def test_a_finished_training_leaves_no_checkpoint_and_repeats_itself(method, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = replace(bdl_imdb.PLAN, epochs=2, more_epochs=2, batch_size=10, num_samples=2)
    settings = plan.methods()[method]
    cells = [Cell(REFERENCE, method, split=split) for split in (8, 9, 8)]
    outcomes = []
    for cell in cells:  # the second takes the MAP fit of the first out of the store
        outcomes += bdl_imdb.EXPERIMENT.run([cell], [bdl_imdb.generate_cell(cell)], settings, None)
        folder = tmp_path / "dubito" / "trained"
        assert folder.is_dir() and not list(folder.iterdir())
    distances = [outcome.metrics["total_variation"] for outcome in outcomes]
    assert distances[0] == distances[2] != distances[1]


# -- IVON -------------------------------------------------------------------------------------------------------


def test_without_ivons_package_its_name_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "ivon", None)
    with pytest.raises(ConfigError, match="pip install ivon-opt"):
        ivon.package()


@needs_ivon
def test_ivon_runs_as_the_references_posterior():
    before = torch.get_rng_state()
    rehearsed(bdl_imdb.EXPERIMENT, "paper", Cell(REFERENCE, "ivon"))
    assert torch.equal(torch.get_rng_state(), before)


@needs_ivon
def test_ivon_finds_the_posterior_of_a_logistic_regression_with_our_prior():
    """One feature, two logits: the posterior mean of their difference is known by quadrature."""
    stream = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 1, generator=stream)
    targets = (torch.rand(40, 1, generator=stream) < (2 * inputs).sigmoid()).long()[:, 0]
    network = nn.Linear(1, 2, bias=False)
    settings = ivon.Ivon(prior_std=0.5, lr=0.05, hess_init=1.0, beta2=0.999)
    fitted = settings.descended(network, Part(inputs, targets), 1500, 40, seed=0)
    # Logits are (w₀ x, w₁ x): the difference d has the prior N(0, 2σ²), and the sum is left at its prior.
    grid = torch.linspace(-4, 8, 4001, dtype=torch.float64)[:, None]
    losses = F.softplus(-grid * inputs.T * (2 * targets - 1)).sum(1)
    log_density = -losses - grid[:, 0].square() / (4 * 0.25)
    density = (log_density - log_density.max()).exp()
    mean = float((density * grid[:, 0]).sum() / density.sum())
    found = float((network.weight[1] - network.weight[0]).detach())
    assert found == pytest.approx(mean, abs=0.1)
    group = fitted.optimizer.param_groups[0]
    assert group["ess"] * group["weight_decay"] == pytest.approx(0.5**-2)

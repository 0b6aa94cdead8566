"""The search over prior precision and data scale against brute force: every pair predicted by the ordinary path."""

import dataclasses

import pytest
import torch
from laplace_reference import cnn, labels, mlp, normal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dubito import EFB, INF, KFAC, Categorical, ConfigError, DataError, Diagonal, Gaussian, Laplace, Poisson, load
from dubito.inference.laplace import search

pytestmark = [
    pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning"),
    # Of pairs with next to no prior, in float32.
    pytest.mark.filterwarnings("ignore:a 4 x 4 Cholesky factorisation cannot be trusted:dubito.DubitoWarning"),
]

STRUCTURES = [Diagonal(), KFAC(), EFB(), INF(rank=4)]
every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=str)
TRIALS = 16


def problem(kind: str, rows: int = 30) -> tuple[nn.Module, object, Tensor, Tensor]:
    """A network, a likelihood, and rows of which the first half are trained on."""
    if kind == "convolution":
        return cnn(), Categorical(), normal(2 * rows, 2, 6, 5), labels(2 * rows)
    inputs = normal(2 * rows, 4)
    if kind == "classes":
        return mlp(), Categorical(), inputs, labels(2 * rows)
    network = mlp(2 if kind == "reals" else 1)
    if kind == "counts":
        return network, Poisson(), inputs, labels(2 * rows, 4).double().unsqueeze(1)
    return network, Gaussian(), inputs, network(inputs).detach() + 0.3 * normal(2 * rows, 2, seed=3)


def fitted(structure, kind: str = "classes", **options):
    network, likelihood, inputs, targets = problem(kind)
    method = Laplace(structure=structure, prior_precision=0.7, **options)
    posterior = method.fit(network, (inputs[:30], targets[:30]), likelihood)
    return posterior, (inputs[30:], targets[30:])


def tried(posterior, tuned) -> list:
    """Fresh posteriors with the pairs of a search, by the ordinary path: other details, everything built anew."""
    found = tuned.details["search"]
    pairs = zip(found["precision_factors"], found["scale_factors"], strict=True)
    return [
        posterior._with(prior_precision=posterior.prior_precision * precision, data_scale=posterior.data_scale * scale)
        for precision, scale in pairs
    ]


def nll(posterior, rows, **options) -> float:
    """By `predict` alone."""
    return -float(posterior.predict(rows[0], **options).log_prob(rows[1]).mean())


@pytest.mark.parametrize(
    ("kind", "structure"),
    [("classes", one) for one in STRUCTURES]
    + [("reals", one) for one in STRUCTURES[1:]]
    + [("convolution", INF(rank=4)), ("counts", KFAC())],
    ids=str,
)
def test_linearised_losses_of_all_pairs_are_those_of_fresh_posteriors(structure, kind: str) -> None:
    posterior, rows = fitted(structure, kind)
    tuned = posterior.tuned(validation=rows, predictive="linearised", trials=TRIALS)
    found = tuned.details["search"]
    expected = [nll(other, rows, linearised=True) for other in tried(posterior, tuned)]
    assert found["losses"] == pytest.approx(expected, rel=1e-6)
    assert len(expected) == TRIALS
    assert found["loss"] == pytest.approx(min(expected), rel=1e-6)
    assert nll(tuned, rows, linearised=True) == pytest.approx(min(expected), rel=1e-6)
    assert found["present_loss"] == pytest.approx(nll(posterior, rows, linearised=True), rel=1e-6)


@every_structure
def test_draws_judge_as_predict_draws(structure) -> None:
    posterior, rows = fitted(structure)
    tuned = posterior.tuned(validation=rows, predictive="draws", trials=12, num_samples=8, seed=5)
    found = tuned.details["search"]
    draws = {"linearised": False, "num_samples": 8, "seed": 5}
    assert found["loss"] == pytest.approx(nll(tuned, rows, **draws), rel=1e-6)
    # The first pair of either half is judged by all draws; a pair that is dropped had 2 or 4 of them.
    everything = [
        [nll(other, rows, linearised=False, num_samples=count, seed=5) for count in (2, 4, 8)]
        for other in tried(posterior, tuned)
    ]
    assert found["losses"][0] == pytest.approx(everything[0][-1], rel=1e-6)
    for loss, by_draws in zip(found["losses"], everything, strict=True):
        assert any(loss == pytest.approx(value, rel=1e-6) for value in by_draws)
    for first, half in ((0, everything[:6]), (6, everything[6:])):
        running = range(6)
        for place in (0, 1):
            order = sorted(running, key=lambda number: half[number][place])
            running = {0, *order[: -(-len(order) // 2)]}
        dropped = [number for number in range(6) if number not in running]
        assert all(found["losses"][first + n] != pytest.approx(half[n][2], rel=1e-9) for n in dropped)
        assert min(half[number][2] for number in running) >= found["loss"] - 1e-6
    assert min(half[number][2] for number in running) == pytest.approx(found["loss"], rel=1e-6)


def test_a_pair_is_a_ratio_and_a_factor_for_priors_by_layer_too() -> None:
    posterior, rows = fitted(KFAC())
    posterior = posterior.tuned(per_layer=True)
    tuned = posterior.tuned(validation=rows, predictive="linearised", trials=TRIALS)
    factors = {tuned.prior_precision[name] / value for name, value in posterior.prior_precision.items()}
    assert max(factors) == pytest.approx(min(factors))
    assert tuned.details["search"]["loss"] == pytest.approx(nll(tuned, rows, linearised=True), rel=1e-6)


@pytest.mark.parametrize("predictive", ["draws", "linearised"])
def test_the_scale_of_a_posterior_counts(predictive) -> None:
    posterior, rows = fitted(KFAC())
    scaled = posterior.scaled(0.3)
    tuned = scaled.tuned(validation=rows, predictive=predictive, trials=TRIALS, num_samples=4)
    options = {"linearised": predictive == "linearised", "num_samples": 4}
    assert tuned.details["search"]["loss"] == pytest.approx(nll(tuned, rows, **options), rel=1e-6)
    assert tuned.scale == 0.3


class Counting(TensorDataset):
    """Rows that count how often they are read."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def passes_of(posterior, rows, **options) -> tuple[int, int]:
    """Rows that went through the network, in passes over all of them, and passes over the data."""
    seen: list[int] = []
    handle = posterior.network.register_forward_hook(lambda module, inputs, outputs: seen.append(len(inputs[0])))
    data = Counting(*rows)
    posterior.tuned(validation=data, trials=300, **options)
    handle.remove()
    return sum(seen), data.reads


@pytest.mark.parametrize("structure", [KFAC(), INF(rank=4)], ids=str)
def test_three_hundred_linearised_trials_cost_less_than_ten_passes(structure) -> None:
    network, likelihood, inputs, targets = problem("reals")
    half = nn.Sequential(*network).float()
    posterior = Laplace(structure=structure, prior_precision=1e-4).fit(
        half, (inputs[:30].float(), targets[:30].float()), likelihood
    )
    rows = inputs[30:].float(), targets[30:].float()
    through, reads = passes_of(posterior, rows, predictive="linearised")
    assert reads == 2 * 30
    # Rows are repeated for the outputs of a backward pass, here 2, and read again where float32 cancels.
    assert through <= 9 * 30


def test_draws_cost_at_most_trials_times_draws_and_bad_pairs_less() -> None:
    posterior, rows = fitted(Diagonal())
    through, reads = passes_of(posterior, rows, predictive="draws", num_samples=16)
    assert through < 300 * 16 * 30 / 3
    assert reads <= 31


def test_draws_are_judged_by_two_thousand_rows_at_most_chosen_by_the_seed(monkeypatch) -> None:
    monkeypatch.setattr(search, "MOST_ROWS", 12)
    posterior, rows = fitted(Diagonal())
    seen = set()
    handle = posterior.network.register_forward_hook(lambda module, inputs, outputs: seen.add(len(inputs[0])))
    options = {"predictive": "draws", "trials": 6, "num_samples": 3}
    tuned = posterior.tuned(validation=rows, **options)
    loader = DataLoader(TensorDataset(*rows), batch_size=5, shuffle=True)
    posterior.tuned(validation=loader, **options)
    handle.remove()
    assert max(seen) == 12
    order = torch.randperm(30, generator=search.seeds.generator(0, "search", "rows"))[:12].sort().values
    some = rows[0][order], rows[1][order]
    assert tuned.details["search"]["loss"] == pytest.approx(nll(tuned, some, linearised=False, num_samples=3), rel=1e-6)


def test_training_rows_are_never_read_and_the_posterior_stays_as_it_was() -> None:
    network, likelihood, inputs, targets = problem("classes")
    data = Counting(inputs[:30], targets[:30])
    posterior = Laplace(structure=INF(rank=4), prior_precision=0.7).fit(network, data, likelihood)
    before, details = data.reads, dict(posterior.details)
    for predictive in ("draws", "linearised"):
        posterior.tuned(validation=(inputs[30:], targets[30:]), predictive=predictive, trials=8, num_samples=2)
    assert data.reads == before
    assert posterior.details == details


@pytest.mark.parametrize("predictive", ["draws", "linearised"])
def test_a_seed_repeats_the_search_and_another_tries_other_pairs(predictive) -> None:
    posterior, rows = fitted(EFB())
    options = {"validation": rows, "predictive": predictive, "trials": 10, "num_samples": 4}
    first, again, other = (posterior.tuned(**options, seed=seed) for seed in (1, 1, 2))
    assert first.details == again.details
    assert first.details["search"]["scale_factors"] != other.details["search"]["scale_factors"]


@pytest.mark.parametrize("predictive", ["draws", "linearised"])
def test_a_row_of_weight_two_counts_twice(predictive) -> None:
    posterior, (inputs, targets) = fitted(KFAC())
    weights = torch.ones(30).double()
    weights[:7] = 2
    options = {"predictive": predictive, "trials": 12, "num_samples": 4}
    once = posterior.tuned(validation=(inputs, targets, weights), **options)
    twice = (torch.cat([inputs, inputs[:7]]), torch.cat([targets, targets[:7]]))
    assert once.details["search"]["losses"] == pytest.approx(
        posterior.tuned(validation=twice, **options).details["search"]["losses"], rel=1e-6
    )


def test_a_network_that_is_too_sure_of_itself_gets_a_narrower_posterior_by_draws() -> None:
    # Draws from a wide posterior ruin a trained network: the search must find that a larger prior precision mends it.
    torch.manual_seed(0)
    network, inputs = mlp(2, hidden=20), normal(200, 4)
    targets = (inputs[:, 0] * inputs[:, 1] > 0).long()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs[:100]), targets[:100]).backward()
        optimizer.step()
    posterior = Laplace(structure=INF(rank=10), prior_precision=0.01).fit(
        network, (inputs[:100], targets[:100]), Categorical()
    )
    tuned = posterior.tuned(validation=(inputs[100:], targets[100:]), predictive="draws", trials=40, num_samples=8)
    assert tuned.prior_precision > 10 * posterior.prior_precision
    assert tuned.details["search"]["loss"] < posterior.details["log_likelihood"] / -100 + 0.5
    assert tuned.details["search"]["loss"] < 0.7 * tuned.details["search"]["present_loss"]


def test_summary_and_file_tell_of_the_search_and_a_later_choice_forgets_it(tmp_path) -> None:
    posterior, rows = fitted(KFAC())
    tuned = posterior.tuned(validation=rows, predictive="draws", trials=6, num_samples=4)
    note = tuned.summary().notes[-1]
    assert "best of 6 pairs by 4 draws of validation rows" in note
    assert f"{tuned.details['search']['loss']:.4g}" in note
    tuned.save(tmp_path / "tuned.safetensors")
    read = load(tmp_path / "tuned.safetensors", mlp())
    assert read.details["search"] == tuned.details["search"]
    assert nll(read, rows, linearised=True) == nll(tuned, rows, linearised=True)
    assert not tuned.tuned().summary().notes
    linear = posterior.tuned(validation=rows, predictive="linearised", trials=6)
    assert "by linearised predictions" in linear.summary().notes[-1]
    assert dataclasses.replace(linear.method) == posterior.method


@pytest.mark.parametrize("trials", [1, 2, 3])
def test_few_trials_begin_with_the_present_pair(trials: int) -> None:
    posterior, rows = fitted(Diagonal())
    found = posterior.tuned(validation=rows, predictive="linearised", trials=trials).details["search"]
    assert len(found["losses"]) == trials
    assert found["precision_factors"][0] == found["scale_factors"][0] == 1


def test_what_cannot_be_searched_is_refused_before_work() -> None:
    posterior, rows = fitted(Diagonal())
    for options in ({}, {"noise": True, "validation": rows}, {"per_layer": True, "validation": rows}):
        with pytest.raises(ConfigError, match="searches prior precision and data scale together"):
            posterior.tuned(predictive="draws", **options)
    with pytest.raises(ConfigError, match="predictive"):
        posterior.tuned(predictive="probit", validation=rows)
    with pytest.raises(ConfigError, match="trials"):
        posterior.tuned(predictive="draws", validation=rows, trials=0)
    with pytest.raises(DataError, match=r"labels must lie in 0\.\.2"):
        posterior.tuned(predictive="draws", validation=(rows[0], torch.full((30,), 3)))

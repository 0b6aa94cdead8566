"""Gal and Ghahramani's procedure: the stack against single networks, the step against its formula."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm
from torch import Tensor, nn

from dubito.data import Part
from dubito.errors import ConfigError
from papers.bali.uci import dropout
from papers.bali.uci.dropout import DropoutSearch, Member, Stack, fit, graded, log_likelihood, search

NEVER = 1e-12  # a rate at which nothing is ever dropped


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def part(rows: int = 40, features: int = 3, seed: int = 0, noise: float = 0.1) -> Part:
    inputs = 5 + 2 * torch.randn(rows, features, generator=stream(seed), dtype=torch.float64)
    targets = 10 + 3 * inputs[:, :1] + noise * torch.randn(rows, 1, generator=stream(seed + 1), dtype=torch.float64)
    return Part(inputs, targets)


def alone(stack: Stack, m: int) -> nn.Sequential:
    """Member m of a stack as a plain network."""
    first = nn.Linear(stack.kernel1.shape[1], stack.kernel1.shape[2])
    last = nn.Linear(stack.kernel2.shape[1], 1)
    with torch.no_grad():
        first.weight.copy_(stack.kernel1[m].T)
        first.bias.copy_(stack.bias1[m, 0])
        last.weight.copy_(stack.kernel2[m].T)
        last.bias.copy_(stack.bias2[m, 0])
    return nn.Sequential(first, nn.ReLU(), last)


MEMBERS = (Member(0, 0.1, 1.0), Member(1, 0.1, 1.0), Member(1, 0.2, 1.0))


def stacked() -> tuple[Stack, Tensor]:
    stack = Stack(3, 7, MEMBERS, [11, 12])
    with torch.no_grad():
        stack.bias1.normal_(generator=stream(5))
        stack.bias2.normal_(generator=stream(6))
    return stack, torch.randn(9, 2, 3, generator=stream(7))


def test_each_output_of_a_stack_is_its_members_own_network():
    stack, inputs = stacked()
    outputs = stack.eval()(inputs)
    assert outputs.shape == (9, 3)
    for m, member in enumerate(MEMBERS):
        torch.testing.assert_close(outputs[:, m : m + 1], alone(stack, m)(inputs[:, member.part]))


def test_members_start_from_weights_of_their_own_whatever_stands_beside_them():
    whole = Stack(3, 7, MEMBERS, [11, 12])
    single = Stack(3, 7, (Member(0, 0.1, 1.0),), [11])
    torch.testing.assert_close(single.kernel1[0], whole.kernel1[0])
    assert not torch.equal(whole.kernel1[0], whole.kernel1[1])
    assert not torch.equal(whole.kernel1[1], whole.kernel1[2])
    limit = (6 / (3 + 7)) ** 0.5  # Glorot's uniform law
    assert 0.8 * limit < float(whole.kernel1.detach().abs().max()) <= limit


def test_dropout_of_a_stack_has_each_members_rate_on_the_inputs_of_both_layers():
    members = (Member(0, 0.1, 1.0), Member(0, 0.4, 1.0))
    stack = Stack(4, 5, members, [1])
    shares: dict[nn.Module, float] = {}

    def record(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        shares[layer] = float((output == 0).float().mean())

    for layer in (*stack.inner, *stack.outer):
        layer.register_forward_hook(record)
    with torch.no_grad():
        stack.bias1.fill_(100.0)  # every unit is on, so zeros are dropped ones
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            stack.train()(torch.ones(4000, 1, 4))
    # 16,000 and 20,000 masks: five standard deviations are at most 5 · sqrt(0.24 / 16000) = 0.02
    assert [round(shares[layer], 1) for layer in stack.inner] == [0.1, 0.4]
    assert shares[stack.inner[0]] == pytest.approx(0.1, abs=0.02)
    assert shares[stack.outer[1]] == pytest.approx(0.4, abs=0.02)


def test_a_step_is_adams_on_squared_error_and_weight_decay_of_the_kernels():
    """Against autograd on their printed loss: (y − f)² + l² (1 − p)/(2 N τ) ‖W‖², biases free."""
    tables = [part(seed=0), part(seed=10)]
    members = (Member(0, NEVER, 0.5), Member(1, NEVER, 2.0))
    settings = DropoutSearch(precisions=(1.0,), rates=(NEVER,), hidden=5, lengthscale=4.0, epochs=1, lr=0.01)
    fitted = fit(tables, members, settings, [3, 4])
    trained = fitted.posterior.network
    assert isinstance(trained, Stack)
    for m, member in enumerate(members):
        network = alone(Stack(3, 5, members, [3, 4]), m).double()
        data = tables[member.part]
        inputs = (data.inputs - data.inputs.mean(0)) / data.inputs.std(0, unbiased=False)
        targets = (data.targets - data.targets.mean(0)) / data.targets.std(0, unbiased=False)
        kernels = [network[0].weight, network[2].weight]
        reg = settings.lengthscale**2 / (2 * len(inputs) * member.precision)
        loss = (network(inputs) - targets).square().mean() + reg * sum(w.square().sum() for w in kernels)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01, eps=1e-7)
        loss.backward()
        optimizer.step()
        # Float32 against float64: where a gradient is small beside its terms, its sign carries their rounding.
        torch.testing.assert_close(trained.kernel1[m].T.double(), network[0].weight, atol=2e-5, rtol=0)
        torch.testing.assert_close(trained.kernel2[m].T.double(), network[2].weight, atol=2e-5, rtol=0)
        torch.testing.assert_close(trained.bias1[m, 0].double(), network[0].bias, atol=2e-5, rtol=0)
        torch.testing.assert_close(trained.bias2[m, 0].double(), network[2].bias, atol=2e-5, rtol=0)


def test_an_epoch_has_a_step_for_the_short_last_batch_too():
    settings = DropoutSearch(precisions=(1.0,), hidden=5, epochs=2, batch_size=16)
    whole = fit([part()], (Member(0, 0.1, 1.0),), settings, [0])  # 40 rows: 3 steps an epoch
    cut = fit([part()], (Member(0, 0.1, 1.0),), settings, [0], steps=6)
    shorter = fit([part()], (Member(0, 0.1, 1.0),), settings, [0], steps=5)
    torch.testing.assert_close(whole.posterior.network.kernel1, cut.posterior.network.kernel1)
    assert not torch.equal(whole.posterior.network.kernel1, shorter.posterior.network.kernel1)


def test_the_log_likelihood_is_that_of_the_mixture_in_original_units():
    means = torch.randn(50, 6, 1, generator=stream(1), dtype=torch.float64)
    targets = torch.randn(6, 1, generator=stream(2), dtype=torch.float64)
    densities = norm.logpdf(targets.numpy(), means.numpy(), 0.4**-0.5)[..., 0]
    expected = np.mean(logsumexp(densities, axis=0) - np.log(50))
    assert log_likelihood(targets, means, 0.4) == pytest.approx(expected, rel=1e-12)


def test_draws_are_in_original_units_and_vary_with_the_masks():
    table = part(rows=60)
    settings = DropoutSearch(precisions=(1.0,), hidden=20, epochs=150, lr=0.01)
    members = (Member(0, NEVER, 1.0), Member(0, 0.1, 1.0))
    fitted = fit([table], members, settings, [0])
    (_, still), (_, moving) = fitted.draws([table.inputs], 20, seed=0)
    assert still.shape == (20, 60, 1)
    assert float(still.std(0).max()) < 1e-4
    assert float(moving.std(0).min()) > 1e-3
    spread = float(table.targets.std())
    assert float((still.mean(0) - table.targets).square().mean().sqrt()) < 0.1 * spread


def test_the_search_takes_the_best_of_the_grid_and_refits_on_all_rows():
    train, test = part(rows=100, noise=0.3), part(rows=30, seed=50, noise=0.3)
    settings = DropoutSearch(
        precisions=(0.01, 10.0), rates=(0.005, 0.5), hidden=20, epochs=150, lr=0.01, num_samples=50
    )
    (outcome,) = search([train], [test], settings, seeds_of_parts=[0])
    grid = {(g["rate"], g["precision"]): g["log_likelihood"] for g in outcome.details["validation"]}
    assert grid.keys() == {(r, p) for r in settings.rates for p in settings.precisions}
    best = max(grid, key=grid.__getitem__)
    assert (outcome.details["rate"], outcome.details["precision"]) == best
    assert best[0] == 0.005  # half of all inputs dropped cannot win on a noise of 5 % of the spread
    spread = float(test.targets.std())
    assert outcome.metrics["rmse"] < 0.2 * spread
    bound = 0.5 * np.log(best[1] / (2 * np.pi))  # the density at its peak
    assert outcome.metrics["log_likelihood"] < bound


def test_rows_of_the_validation_part_are_the_last_fifth():
    """Nonsense in the last fifth must show in the scores of the grid; elsewhere it would not."""
    settings = DropoutSearch(precisions=(1.0,), rates=(0.005,), hidden=20, epochs=100, lr=0.01, num_samples=20)
    plain = part(rows=50)
    spoiled = Part(plain.inputs, plain.targets.clone())
    spoiled.targets[40:] += 1000
    test = part(rows=10, seed=9)
    (good,), (bad,) = (search([p], [test], settings, seeds_of_parts=[0]) for p in (plain, spoiled))
    scores = [o.details["validation"][0]["log_likelihood"] for o in (good, bad)]
    assert scores[0] > -100
    assert scores[1] < -1e5


def test_the_search_alone_may_be_shorter():
    settings = DropoutSearch(precisions=(1.0,), rates=(0.005,), hidden=10, epochs=60, lr=0.01, num_samples=10)
    short = replace(settings, search_epochs=2)
    (whole,), (other,) = (search([part()], [part(seed=3)], s, seeds_of_parts=[0]) for s in (settings, short))
    assert other.metrics == whole.metrics  # of the refit
    assert other.details["validation"] != whole.details["validation"]


def test_rows_are_graded_piece_by_piece_where_all_draws_are_too_many(monkeypatch):
    settings = DropoutSearch(precisions=(1.0,), rates=(NEVER,), hidden=5, epochs=2)
    tables = [part(seed=0), part(seed=5)]
    grid = fit(tables, (Member(0, NEVER, 1.0), Member(1, NEVER, 1.0)), settings, [0, 1])
    whole = graded(grid, tables, (1.0, 2.0), 10, 0)
    monkeypatch.setattr(dropout, "MOST_OUTPUTS", 17 * 2 * 10)  # 17 rows, 17 rows, 6 rows
    for pieces, at_once in zip(graded(grid, tables, (1.0, 2.0), 10, 0), whole, strict=True):
        assert pieces == pytest.approx(at_once)


def test_the_same_seed_gives_the_same_outcome_and_leaves_the_global_state_alone():
    settings = DropoutSearch(precisions=(1.0,), hidden=5, epochs=2, num_samples=5)
    before = torch.get_rng_state()
    first, again, other = (search([part()], [part(seed=3)], settings, seeds_of_parts=[s]) for s in (0, 0, 1))
    assert first == again
    assert first != other
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "wrong", [{"precisions": (0.0,)}, {"rates": (0.0,)}, {"epochs": 0}, {"validation": 1.0}, {"lengthscale": -1}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ConfigError):
        DropoutSearch(**{"precisions": (1.0,), **wrong})

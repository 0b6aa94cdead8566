"""Acquisition by its definition, batches, and the loop: curves, resumption, labels unseen until asked for."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import KFAC, Bernoulli, Categorical, ConfigError, DataError, Gaussian, Laplace, StorageError, Training
from dubito.active import (
    BALD,
    ActiveLearning,
    Curve,
    CurvePoint,
    Entropy,
    LogitVariance,
    Margin,
    OutputVariance,
    Random,
    Selection,
    VariationRatio,
    mean_curve,
    paired_difference,
)

QUICK = Training(epochs=4, batch_size=16, lr=3e-2)


def rows(*shape: int, seed: int = 0, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def net(outputs: int = 3, dtype=torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).to(dtype)


def classes(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


@pytest.fixture(scope="module")
def members():
    x = rows(60, 4)
    return dubito.DeepEnsemble(members=5).fit(net(), (x, classes(x)), Categorical(), training=QUICK)


# -- scores -----------------------------------------------------------------------------------------------------


def test_class_scores_follow_their_definition(members):
    pool = rows(30, 4, seed=1)
    probs = members.sample_outputs(pool, 5).softmax(-1)
    mean = probs.mean(0)
    entropies = -(probs * probs.log()).sum(-1)
    total = -(mean * mean.log()).sum(-1)
    torch.testing.assert_close(Entropy().scores(members, pool), total)
    torch.testing.assert_close(BALD().scores(members, pool), total - entropies.mean(0), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(VariationRatio().scores(members, pool), 1 - mean.amax(1))
    best = mean.sort(1, descending=True).values
    torch.testing.assert_close(Margin().scores(members, pool), best[:, 1] - best[:, 0])
    logits = members.sample_outputs(pool, 32)  # the members in turn, so that 32 draws are no multiple of 5
    expected = logits.var(0, unbiased=False).mean(1)
    torch.testing.assert_close(OutputVariance().scores(members, pool), expected)
    logits = members.sample_outputs(pool, 5)
    expected = (logits - logits.mean(2, keepdim=True)).var(0, unbiased=False).mean(1)
    torch.testing.assert_close(LogitVariance().scores(members, pool), expected)
    random = Random().scores(members, pool, seed=4)
    assert random.shape == (30,) and torch.equal(random, Random().scores(members, pool, seed=4))
    assert not torch.equal(random, Random().scores(members, pool, seed=5))


def test_two_classes_and_reals():
    x = rows(60, 4)
    yes = dubito.DeepEnsemble(members=3).fit(net(1), (x, classes(x) > 0), Bernoulli(), training=QUICK)
    probs = yes.predict(x).probs[:, 0]
    torch.testing.assert_close(Margin().scores(yes, x), -(2 * probs - 1).abs())
    torch.testing.assert_close(VariationRatio().scores(yes, x), torch.minimum(probs, 1 - probs))
    real = dubito.DeepEnsemble(members=3).fit(net(2), (x, x[:, :2]), Gaussian(std=0.3), training=QUICK)
    means = real.sample_outputs(x, 3)
    variance = means.var(0, unbiased=False)
    torch.testing.assert_close(BALD().scores(real, x), (0.5 * (1 + variance / 0.09).log()).mean(1))
    torch.testing.assert_close(Entropy().scores(real, x), (0.5 * (variance + 0.09).log()).mean(1))
    for wrong in (Margin(), VariationRatio(), LogitVariance()):
        with pytest.raises(DataError, match="is for classes"):
            wrong.scores(real, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("outputs", [1, 3])
def test_output_variance_is_mackays_by_dense_jacobians(dtype, outputs):
    """J P⁻¹ Jᵀ with the dense covariance of every block."""
    x = rows(40, 4, dtype=dtype)
    likelihood, targets = (Categorical(), classes(x)) if outputs > 1 else (Gaussian(std=0.5), x[:, :1])
    posterior = Laplace(structure=KFAC()).fit(net(outputs, dtype), (x, targets), likelihood, training=QUICK)
    pool = rows(7, 4, seed=2, dtype=dtype)
    names = list(posterior.weights())
    expected = torch.zeros(7, dtype=torch.float64)
    for row in range(7):
        for output in range(outputs):
            network = posterior.network.requires_grad_(True)
            gradients = torch.autograd.grad(network(pool[row : row + 1])[0, output], list(network.parameters()))
            named = dict(zip(names, gradients, strict=True))
            network.requires_grad_(False)
            for block in posterior.blocks.values():
                matrix = torch.cat([named[block.weight], named[block.bias][:, None]], 1).reshape(-1).double()
                covariance = posterior.block(block.name).covariance_matrix.double()
                expected[row] += matrix @ covariance @ matrix / outputs
    found = OutputVariance().scores(posterior, pool)
    torch.testing.assert_close(found.double(), expected, rtol=2e-3 if dtype == torch.float32 else 1e-8, atol=0)


# -- batches ----------------------------------------------------------------------------------------------------


def test_the_highest_scores_are_chosen():
    scores = torch.tensor([0.1, 0.9, 0.4, 0.7])
    assert Selection(size=2).choose(scores).tolist() == [1, 3]
    ties = {int(Selection().choose(torch.ones(5), seed=seed)) for seed in range(40)}
    assert ties == set(range(5))  # no row is preferred for its place
    infinite = torch.tensor([-math.inf, 0.0, 1.0])
    assert Selection(size=2).choose(infinite).tolist() == [2, 1]
    with pytest.raises(DataError, match="at least 5 rows"):
        Selection(size=5).choose(scores)
    with pytest.raises(DataError, match="NaN"):
        Selection().choose(torch.tensor([0.0, math.nan]))


def test_drawn_batches_follow_the_softmax():
    scores = torch.tensor([0.0, 1.0, 2.0])
    rule = Selection(temperature=0.8)
    count = 4000
    firsts = torch.tensor([int(rule.choose(scores, seed=seed)) for seed in range(count)])
    found = torch.bincount(firsts, minlength=3) / count
    expected = ((scores - 1) / scores.std() / 0.8).softmax(0)
    assert ((found - expected).abs() < 4 * (expected * (1 - expected) / count).sqrt()).all()
    whole = Selection(size=3, temperature=0.8).choose(scores, seed=1)
    assert sorted(whole.tolist()) == [0, 1, 2]  # none twice
    with pytest.raises(ConfigError, match="temperature"):
        Selection(temperature=-1.0)


# -- the loop ---------------------------------------------------------------------------------------------------

POOL = rows(50, 4, seed=7)
TEST = (rows(40, 4, seed=8), classes(rows(40, 4, seed=8)))
LOOP = ActiveLearning(
    method=dubito.DeepEnsemble(members=2),
    acquisition=Entropy(),
    selection=Selection(size=2),
    steps=3,
    initial=6,
    training=QUICK,
    num_samples=4,
)


def test_a_run_step_by_step():
    curve = LOOP.run(net(), (POOL, classes(POOL)), TEST, Categorical(), seed=5)
    assert [point.num_labelled for point in curve.points] == [6, 8, 10, 12]
    assert curve.points[-1].chosen == () and all(len(point.chosen) == 2 for point in curve.points[:-1])
    labelled = torch.randperm(50, generator=dubito.seeds.generator(5, "initial rows"))[:6].tolist()
    for step, point in enumerate(curve.points):
        own = dubito.seeds.derived(5, "step", step)
        fitted = LOOP.method.fit(
            net(), (POOL[labelled], classes(POOL)[labelled]), Categorical(), training=QUICK, seed=own
        )
        assert point.metrics == pytest.approx(fitted.evaluate(TEST, num_samples=4, seed=own))
        left = [row for row in range(50) if row not in labelled]
        scores = Entropy().scores(fitted, POOL[left], num_samples=4, seed=own)
        if point.chosen:
            best = [left[place] for place in scores.argsort(descending=True)[:2].tolist()]
            assert list(point.chosen) == best
        labelled += point.chosen
    assert len(set(labelled)) == 12
    assert curve.average("nll") == pytest.approx(sum(curve.values("nll")[1:]) / 3)
    assert curve.overhead >= 0
    with pytest.raises(ConfigError, match="metric must be one of"):
        curve.values("rmse")


def test_rows_keep_their_weights_and_options_go_first():
    weights = torch.zeros(50)
    with pytest.raises(DataError, match="weights"):
        LOOP.run(net(), (POOL, classes(POOL), weights), TEST, Categorical(), seed=5)
    curve = LOOP.run(net(), (POOL, classes(POOL)), TEST, Categorical(), seed=5, options={"num_samples": 2})
    assert len(curve.points) == 4


def test_labels_are_not_looked_at_before_they_are_asked_for():
    """Labels that no step asked for may be anything."""
    curve = LOOP.run(net(), (POOL, classes(POOL)), TEST, Categorical(), seed=5)
    initial = torch.randperm(50, generator=dubito.seeds.generator(5, "initial rows"))[:6].tolist()
    seen = [*initial, *(row for point in curve.points for row in point.chosen)]
    spoilt = torch.zeros(50, dtype=torch.long)
    spoilt[seen] = classes(POOL)[seen]
    again = LOOP.run(net(), (POOL, spoilt), TEST, Categorical(), seed=5)
    assert [p.chosen for p in again.points] == [p.chosen for p in curve.points]
    assert [p.metrics for p in again.points] == [p.metrics for p in curve.points]


def test_an_interrupted_run_goes_on(tmp_path):
    expected = LOOP.run(net(), (POOL, classes(POOL)), TEST, Categorical(), seed=5)

    class Crash(Exception):
        pass

    def crash(point: CurvePoint) -> None:
        if point.num_labelled == 8:
            raise Crash

    path = tmp_path / "run"
    with pytest.raises(Crash):
        LOOP.run(net(), (POOL, classes(POOL)), TEST, Categorical(), seed=5, checkpoint=path, on_point=crash)
    steps = []
    found = LOOP.run(net(), (POOL, classes(POOL)), TEST, Categorical(), seed=5, checkpoint=path, on_point=steps.append)
    assert [point.num_labelled for point in steps] == [10, 12]  # the others are not made again
    assert [(p.chosen, p.metrics) for p in found.points] == [(p.chosen, p.metrics) for p in expected.points]
    for change in ({"seed": 6}, {"options": {"max_rows": 3}}):
        arguments = {"seed": 5, **change}
        with pytest.raises(StorageError, match="belongs to another run"):
            LOOP.run(net(), (POOL, classes(POOL)), TEST, Categorical(), checkpoint=path, **arguments)
    with pytest.raises(StorageError, match="first weights"):
        other = net()
        nn.init.zeros_(other[0].weight)
        LOOP.run(other, (POOL, classes(POOL)), TEST, Categorical(), seed=5, checkpoint=path)


def test_laplace_is_tuned_and_judged_linearised():
    loop = ActiveLearning(
        method=Laplace(structure=KFAC()), acquisition=OutputVariance(), steps=2, initial=15, training=QUICK
    )
    finished = []

    def tuned(posterior):
        finished.append(posterior.tuned())
        return finished[-1]

    y = POOL[:, :1]
    test = (rows(20, 4, seed=9), rows(20, 4, seed=9)[:, :1])
    curve = loop.run(net(1), (POOL, y), test, Gaussian(std=0.5), finish=tuned, options={"linearised": True})
    assert len(finished) == 3
    for posterior, point in zip(finished, curve.points, strict=True):
        assert point.metrics == pytest.approx(posterior.evaluate(test, linearised=True))


def test_refusals():
    with pytest.raises(ConfigError, match=r"linearised=True is for posteriors of Laplace, got one of"):
        LOOP.run(net(), (POOL, classes(POOL)), TEST, Categorical(), options={"linearised": True})
    with pytest.raises(DataError, match="need a pool of at least 12 rows, got 11"):
        LOOP.run(net(), (POOL[:11], classes(POOL)[:11]), TEST, Categorical())
    fits: list = []
    loop = dataclasses.replace(LOOP, acquisition=Margin())
    with pytest.raises(DataError, match="Margin is for classes, got Gaussian"):
        loop.run(net(), (POOL, POOL[:, :1]), (POOL, POOL[:, :1]), Gaussian(), on_point=fits.append)
    with pytest.raises(DataError, match="test must be a pair"):
        LOOP.run(net(), (POOL, classes(POOL)), POOL, Categorical(), on_point=fits.append)
    assert not fits
    with pytest.raises(ConfigError, match="acquisition must be OutputVariance"):
        ActiveLearning(method=dubito.MAP(), acquisition="bald")
    with pytest.raises(ConfigError, match="steps"):
        ActiveLearning(method=dubito.MAP(), acquisition=BALD(), steps=0)


# -- curves -----------------------------------------------------------------------------------------------------


def curve(*values: float, start: int = 5) -> Curve:
    points = [
        CurvePoint(num_labelled=start + i, metrics={"rmse": value}, chosen=(), fit_seconds=1.0, acquisition_seconds=0.1)
        for i, value in enumerate(values)
    ]
    return Curve(points=tuple(points))


def test_means_and_differences_by_hand():
    first = [curve(9.0, 3.0, 1.0), curve(7.0, 4.0, 2.0)]
    mean = mean_curve(first, "rmse")
    assert mean.num_labelled == (5, 6, 7)
    assert [value.value for value in mean.values] == [8.0, 3.5, 1.5]
    assert mean.values[0].standard_error == pytest.approx(math.sqrt(2) / math.sqrt(2))
    second = [curve(9.0, 4.0, 2.0), curve(7.0, 5.0, 4.0)]
    difference = paired_difference(first, second, "rmse")
    assert difference.difference == pytest.approx(((2 - 3) + (3 - 4.5)) / 2)
    assert first[0].overhead == pytest.approx(0.1)
    with pytest.raises(DataError, match="same steps"):
        mean_curve([curve(1.0), curve(1.0, start=6)], "rmse")

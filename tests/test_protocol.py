"""The protocol: what `training="auto"` does with validation rows, pilots, starts and choices."""

import dataclasses

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import dubito
from dubito import (
    BALI,
    MAP,
    PBP,
    Around,
    BatchEnsemble,
    Categorical,
    ConfigError,
    DataError,
    DubitoWarning,
    Gaussian,
    Implicit,
    Interrupted,
    KTied,
    Laplace,
    MCDropout,
    MeanField,
    OnlineEvidence,
    Rank1,
    Training,
    methods,
    protocol,
)
from dubito.calibration import temperature_scaled
from dubito.protocol import Pilot, recipe
from dubito.protocol.choices import settled
from dubito.training import AutoTraining

QUICK = Training.auto(iterations=60, patience=30, every=5, batch_size=16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows(count: int, seed: int = 0, real: bool = False) -> tuple[Tensor, Tensor]:
    inputs = normal(count, 3, seed=seed)
    score = inputs[:, 0] * inputs[:, 1] + 0.3 * normal(count, seed=seed + 100)
    return inputs, score.unsqueeze(1) if real else (score > 0).long()


def network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, outputs))


def fit(method=None, real=False, **options):
    options = {"training": QUICK, "validation": rows(40, 1, real), "progress": False, **options}
    likelihood = Gaussian() if real else Categorical()
    return (method or MAP()).fit(network(1 if real else 2), rows(120, 0, real), likelihood, **options)


def same(a, b) -> bool:
    return all(torch.equal(value, b.stored()[name]) for name, value in a.stored().items())


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("name", list(methods()))
def test_every_method_is_fitted_and_stored(name, real, tmp_path):
    posterior = fit(methods()[name], real)
    facts = posterior.details["protocol"]
    assert facts["rows"] == 120 and facts["validation_nll"] == facts["validation_nll"]
    posterior.save(tmp_path / "p")
    again = dubito.load(tmp_path / "p", network(1 if real else 2))
    assert again.details["protocol"] == facts
    inputs = rows(5, 2, real)[0]
    assert torch.equal(again.predict(inputs, 4).log_prob(rows(5, 2, real)[1]),
                       posterior.predict(inputs, 4).log_prob(rows(5, 2, real)[1]))  # fmt: skip


@pytest.mark.parametrize("name", ["mean-field", "laplace-kfac", "mc-dropout", "deep-ensemble"])
def test_a_map_fit_made_before_changes_nothing(name):
    """Whoever compares methods trains it once; the result is that of a fit by itself."""
    point, method = fit(), methods()[name]
    shared = protocol.fit(
        method, network(), rows(120), Categorical(), QUICK, validation=rows(40, 1), progress=False, point=point
    )
    assert same(shared, fit(method)) and shared.details == fit(method).details


def test_the_prior_is_that_of_the_best_pilot():
    point = fit()
    pilots = dict(map(tuple, point.details["protocol"]["pilots"]))
    assert list(pilots) == list(QUICK.priors)
    assert point.method.prior_std == min(pilots, key=pilots.__getitem__)
    for prior, loss in pilots.items():  # the losses are those of short runs from the same start
        alone = MAP(prior_std=prior).fit(
            network(), rows(120), Categorical(), training=QUICK.pilot_training(120), validation=rows(40, 1),
            progress=False,
        )  # fmt: skip
        assert alone.history[-1]["best_nll"] == loss
    assert fit(MAP(prior_std=0.5)).details["protocol"]["pilots"] == []


def test_pilots_cost_less_than_one_and_a_half_fits():
    auto = AutoTraining()
    for count in (100, 2000, 50_000):
        whole = auto.steps(count)
        assert len(auto.priors) * auto.pilot_training(count).iterations <= 0.75 * whole + len(auto.priors)
        patience = auto.pilot_training(count).early_stopping.steps
        assert len(auto.priors) * patience <= 0.75 * auto.training(whole).early_stopping.steps
    assert auto.steps(100) == 2000 and auto.steps(50_000) == 10 * 782


def test_settings_of_the_user_stay():
    pilot = Pilot(prior_std=0.3, best_step=100, rows=1000, real=False)
    auto = AutoTraining()
    assert recipe(MeanField(), pilot, auto).method.prior_std == 0.3
    assert recipe(MeanField(prior_std=0.7), pilot, auto).method.prior_std == 0.7
    assert recipe(MCDropout(rate=0.2), dataclasses.replace(pilot, real=True), auto).method.rate == 0.2
    flat = dataclasses.replace(pilot, prior_std=None)
    assert recipe(MeanField(), flat, auto).method.prior_std == 1.0
    assert recipe(Rank1(), pilot, auto).training.weight_decay == pytest.approx(1 / (0.09 * 1000))


def test_a_warm_start_begins_at_the_map_fit():
    """Methods that start from the MAP fit stay near it in a run of few steps; from scratch they would not get there."""
    auto = Training.auto(iterations=4, patience=400, every=20, batch_size=16)
    point = fit(training=Training.auto(iterations=200, batch_size=16, every=20))
    posterior = protocol.fit(
        MeanField(), network(), rows(120), Categorical(), auto, validation=rows(40, 1), progress=False, point=point
    )
    for name, weight in posterior.weights().items():
        start = dict(network().named_parameters())[name]
        assert (weight - point.weights()[name]).abs().max() < 0.01 < (weight - start).abs().max()


@pytest.mark.parametrize("method", [MAP, Laplace, MeanField, KTied])
def test_a_prior_around_pretrained_weights_holds_the_map_fit_too(method):
    """Within some of its standard deviations: without the prior weights move by fifty of them."""
    net, std = network(1), 1e-3
    fitted = method(prior=Around(net, std=std))
    posterior = fit(fitted, real=True, training=dataclasses.replace(QUICK, priors=(0.3, 1.0)))
    assert posterior.method.prior is not None
    moved = [(p - q).abs().max() / std for p, q in zip(posterior.network.parameters(), net.parameters(), strict=True)]
    assert 0 < float(torch.stack(moved).max().detach()) < 5


def test_noise_that_the_user_knows_stays():
    for method in (MAP(), Laplace(), MCDropout()):
        inputs, targets = rows(120, 0, True)
        validation, options = rows(40, 1, True), {"training": QUICK, "progress": False}
        posterior = method.fit(
            network(1), (inputs, targets), Gaussian(std=0.25), validation=validation, **options
        )  # fmt: skip
        assert posterior.likelihood.std().item() == pytest.approx(0.25)


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")  # two passes are few
def test_pbp_filters_rows_by_the_protocol():
    posterior = fit(PBP(epochs=2), real=True)
    assert posterior.details["protocol"]["warm"] and posterior.details["noise"]["shape"] > 6


def test_a_batch_of_one_row_under_batch_norm_says_what_to_do():
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(DataError, match="drop_last"):
        part = TensorDataset(*rows(33))
        loader = DataLoader(part, batch_size=32, sampler=RandomSampler(part, replacement=True))
        MAP().fit(net, loader, Categorical(), training=QUICK, validation=rows(40, 1), progress=False)


@pytest.mark.parametrize("method", [MAP(), BALI(), Laplace()], ids=lambda method: type(method).__name__)
def test_a_loader_with_an_order_of_its_own_keeps_its_batches(method):
    part = TensorDataset(*rows(60))
    loader = DataLoader(part, batch_size=10, sampler=RandomSampler(part, replacement=True))
    posterior = method.fit(network(), loader, Categorical(), training=QUICK, validation=rows(40, 1), progress=False)
    assert posterior.details["protocol"]["rows"] == 60


def test_few_watching_rows_are_too_few_for_longer_fits():
    longer = dataclasses.replace(QUICK, iterations=10, longer=(40,), priors=(None,), watched=39)
    assert len(fit(training=longer).details["protocol"]["runs"]) == 1


def test_a_number_of_data_that_the_user_gives_leaves_the_length_of_a_run(recwarn):
    posterior = fit(num_data=10**6, training=dataclasses.replace(QUICK, iterations=None, patience=5))
    assert posterior.details["protocol"]["rows"] == 120


def test_a_method_of_ones_own_starts_from_scratch():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(MAP):
        pass

    pilot = Pilot(prior_std=1.0, best_step=100, rows=1000, real=False)
    assert not recipe(Mine(), pilot, AutoTraining()).warm


def test_few_of_many_validation_rows_watch_and_all_choose(monkeypatch):
    from dubito.training import loop

    seen, watch = set(), loop.Loop._validate
    monkeypatch.setattr(
        loop.Loop, "_validate", lambda self, count: (seen.add(self.run.validation.num_data), watch(self, count))[1]
    )
    posterior = fit(training=dataclasses.replace(QUICK, watched=25))
    assert seen == {25}
    inputs, targets = rows(40, 1)
    losses = -posterior.predict(inputs).log_prob(targets)
    assert posterior.details["protocol"]["validation_nll"] == pytest.approx(float(losses.mean()), abs=1e-6)


def test_rows_are_kept_back_and_counted():
    with pytest.warns(DubitoWarning, match="12 of 120 training rows are kept back"):
        posterior = fit(validation=None)
    assert posterior.details["protocol"]["rows"] == 108
    with pytest.warns(DubitoWarning, match="24 of 120"):
        fit(validation=None, training=dataclasses.replace(QUICK, held_out=0.2))
    with pytest.warns(DubitoWarning, match="12 of 120"):
        loader = DataLoader(TensorDataset(*rows(120)), batch_size=16, shuffle=True)
        MAP().fit(network(), loader, Categorical(), training=QUICK, progress=False)


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*rows(40), strict=True)


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
def test_ten_rows_leave_two_to_judge():
    posterior = Laplace().fit(nn.Linear(3, 2), rows(10), Categorical(), training=QUICK, progress=False)
    assert posterior.details["protocol"]["rows"] == 8


def test_what_cannot_be_parted_is_refused_before_work():
    with pytest.raises(ConfigError, match="pass validation="):
        MAP().fit(network(), Stream(), Categorical(), training="auto", num_data=40)
    with pytest.raises(ConfigError, match="training of its own"):
        Laplace(evidence=OnlineEvidence()).fit(network(), rows(20), Categorical(), training="auto")
    with pytest.raises(DataError, match="at least 10 rows"):
        MAP().fit(network(), rows(8), Categorical(), training="auto")
    with pytest.raises(ConfigError, match='or "auto", got'):
        MAP().fit(network(), rows(8), Categorical(), training="automatic")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="MAP fit of the protocol"):
        protocol.pilot_of(MAP().fit(network(), rows(20), Categorical(), training=Training(iterations=2)))
    for wrong in ({"priors": ()}, {"pilot": 0.0}, {"held_out": 1.0}, {"patience": 0}):
        with pytest.raises(ConfigError):
            Training.auto(**wrong)


@pytest.mark.parametrize("method", [MAP(), MeanField(), Laplace()], ids=lambda method: type(method).__name__)
def test_real_targets_of_any_units(method):
    """A fit to a·y + b is the fit to y in other units."""
    inputs, targets = rows(120, 0, True)
    validation = rows(40, 1, True)
    plain = fit(method, real=True)
    scaled = method.fit(
        network(1), (inputs, 1e5 * targets + 1e6), Gaussian(), training=QUICK, progress=False,
        validation=(validation[0], 1e5 * validation[1] + 1e6),
    )  # fmt: skip
    a, b = plain.predict(inputs), scaled.predict(inputs)
    assert torch.allclose((b.mean - 1e6) / 1e5, a.mean, atol=2e-2)
    assert torch.allclose(b.std / 1e5, a.std, rtol=2e-2)


@pytest.mark.parametrize("method", [MAP(), MeanField()], ids=lambda method: type(method).__name__)
def test_an_interrupted_fit_goes_on_to_the_same_end(method, tmp_path, monkeypatch):
    from dubito.training import loop

    whole, step = fit(method), loop.Loop._step
    for last in (10, 40, 70, 100):
        made = 0

        def counted(self, arguments, last=last):
            nonlocal made
            made += 1
            if made > last:
                raise Interrupted("asked to")
            return step(self, arguments)

        path = tmp_path / str(last)
        with monkeypatch.context() as patch:
            patch.setattr(loop.Loop, "_step", counted)
            training = dataclasses.replace(QUICK)
            with pytest.raises(Interrupted):
                fit(method, checkpoint=path, training=training)
        assert same(fit(method, checkpoint=path), whole)


def test_a_posterior_that_is_far_too_wide_is_scaled_down():
    point = fit(training=Training.auto(iterations=300, patience=300, every=20, batch_size=16))
    prepared = dubito.fitting.prepare(network(), rows(120), Categorical(), validation=rows(200, 1), progress=False)
    wide = MeanField(initial_std=0.5).build(point.fold(0), Categorical(), 120).posterior()
    narrow = MeanField(initial_std=0.05).build(point.fold(0), Categorical(), 120).posterior()
    assert settled(wide, prepared, {}).scale < 1
    assert settled(narrow, prepared, {}).scale > 0


def test_few_rows_that_are_all_right_do_not_ask_for_certainty():
    inputs, targets = rows(30)
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.zero_(), net.bias.zero_()
        net.weight[1, 0] = 1.0
    labels = (inputs[:, 0] > 0).long()
    posterior = MAP().fit(net, (inputs, labels), Categorical(), training=Training(iterations=1, lr=1e-9))
    with pytest.warns(DubitoWarning, match="temperature beyond"):
        assert temperature_scaled(posterior, (inputs, labels)).likelihood.settings.temperature < 0.03
    found = temperature_scaled(posterior, (inputs, labels), smoothed=True).likelihood.settings.temperature
    logits = posterior.network(inputs).detach().double()

    def loss(log_temperature: float) -> float:
        logs = (logits / torch.tensor(log_temperature).exp()).log_softmax(1)
        doubted = 1 / 32  # of 30 rows
        return -float(((1 - doubted) * logs[torch.arange(30), labels] + doubted * logs.mean(1)).mean())

    assert found == pytest.approx(2.718281828 ** minimize_scalar(loss, bounds=(-4, 3), method="bounded").x, rel=1e-3)
    assert targets.shape == labels.shape


def test_a_map_fit_is_made_again_while_its_limit_ends_it():
    """The least validation loss chooses among fits of 10, 40 and 80 steps, each the one a limit alone would give."""
    auto = dataclasses.replace(QUICK, iterations=10, patience=20, longer=(40, 80), priors=(None,))
    point = fit(training=auto)
    facts = point.details["protocol"]
    alone = {limit: fit(training=dataclasses.replace(auto, iterations=limit, longer=())) for limit in (10, 40, 80)}
    losses = {limit: posterior.history[-1]["best_nll"] for limit, posterior in alone.items()}
    assert alone[10].history[-1]["step"] == 10  # the limit ended it
    assert facts["runs"] == [[limit, losses[limit]] for limit, _ in facts["runs"]]
    last = facts["runs"][-1][0]
    assert last == 80 or alone[last].history[-1]["step"] < last  # patience ended the last
    assert len(facts["runs"]) > 1 and facts["limit"] == min(losses, key=losses.__getitem__)
    assert same(point, alone[facts["limit"]])


def test_patience_leaves_a_map_fit_at_its_first_limit():
    auto = dataclasses.replace(QUICK, iterations=400, patience=10, longer=(4000,), lr=0.1)
    point = fit(training=auto)
    assert point.history[-1]["step"] < 400
    assert point.details["protocol"]["limit"] == 400 and len(point.details["protocol"]["runs"]) == 1


def test_methods_from_scratch_have_the_limit_of_the_map_fit():
    auto = AutoTraining()
    pilot = Pilot(prior_std=0.3, best_step=100, rows=1000, real=True, limit=8000)
    assert recipe(MCDropout(), pilot, auto).training.iterations == 8000
    assert recipe(MeanField(), pilot, auto).training.iterations == 1000  # it starts from the fit
    assert recipe(MCDropout(), dataclasses.replace(pilot, limit=None), auto).training.iterations == 2000


@pytest.mark.parametrize("method", [Rank1(), BatchEnsemble(), Implicit()])
def test_factors_of_reals_start_from_a_map_fit_unless_it_was_a_long_one(method):
    auto = AutoTraining()
    short = recipe(method, Pilot(prior_std=0.3, best_step=100, rows=1000, real=True, limit=2000), auto)
    assert short.warm and short.training.iterations == 1000 and short.training.lr == auto.lr / 4
    long = recipe(method, Pilot(prior_std=0.3, best_step=100, rows=1000, real=True, limit=8000), auto)
    assert not long.warm and long.training.iterations == 8000 and long.training.lr == auto.lr
    assert long.training.weight_decay == short.training.weight_decay == pytest.approx(1 / (0.3**2 * 1000))
    assert long.method == short.method


@pytest.mark.parametrize(("count", "fits"), [(39, 1), (40, 2)])
def test_few_validation_rows_leave_a_map_fit_at_its_first_limit(count, fits):
    auto = dataclasses.replace(QUICK, iterations=10, patience=20, longer=(40,), priors=(None,))
    point = fit(training=auto, validation=rows(count, 1))
    assert len(point.details["protocol"]["runs"]) == fits


def test_limits_grow_at_least_twofold_and_only_by_default():
    auto = AutoTraining()
    assert auto.limits(1000, 100, classes=False) == (2000, 8000, 32_000)
    assert auto.limits(50_000, None, classes=False) == (7820, 32_000)
    assert auto.limits(500_000, 50_000, classes=False) == (78_130,)
    assert AutoTraining(iterations=60).limits(1000, 100, classes=False) == (60,)
    assert AutoTraining(iterations=60, longer=(100, 240)).limits(1000, 40, classes=False) == (60, 240)
    assert AutoTraining(longer=()).limits(1000, 100, classes=False) == (2000,)
    assert auto.limits(1000, 39, classes=False) == (2000,)  # too few to judge
    assert auto.limits(1000, 100, classes=True) == (2000,)
    assert AutoTraining(longer=(4000,)).limits(1000, 100, classes=True) == (2000, 4000)
    with pytest.raises(ConfigError, match="longer"):
        AutoTraining(longer=(0,))

"""`Gaussian(standardise=True)`: a fit to a·y + b is the fit to y, in other units, for every method."""

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dubito
from dubito import (
    BALI,
    GGN,
    KFAC,
    MAP,
    ConfigError,
    DeepEnsemble,
    DubitoWarning,
    Gaussian,
    Laplace,
    MeanField,
    Training,
)
from dubito.active import BALD
from dubito.calibration import ScaledResiduals, temperature_scaled
from dubito.likelihoods.moments import moments

from .cases import METHODS, rows

pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")
INPUTS = rows((40, 4)).double()
_raw = torch.stack([INPUTS[:, 0].sin(), INPUTS.sum(1)], 1) + 0.3 * rows((40, 2), 7).double()
STANDARD = (_raw - _raw.mean(0)) / _raw.std(0)
UNITS = torch.tensor([1e5, 3e-4], dtype=torch.float64), torch.tensor([1e6, -2.0], dtype=torch.float64)
MAPPED = STANDARD * UNITS[0] + UNITS[1]
TRAINING = Training(epochs=3, batch_size=16, lr=1e-2)
NEW = rows((9, 4), 11).double()


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def noise(name: str, units: Tensor | float = 1.0) -> float | tuple[float, ...] | None:
    """Learned; for HMC, which asks for it, known and in the targets' units."""
    return tuple((torch.tensor([0.3, 0.4]).double() * units).tolist()) if name == "hmc" else None


def pair(name: str, method=None, **options):
    """The posterior of y, and that of a·y + b."""
    method = method or METHODS[name]
    if name == "hmc":
        method = replace(method, num_samples=4, warmup=4, chains=2)
    run = {} if name == "hmc" else {"training": TRAINING}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)
        plain = method.fit(network(), (INPUTS, STANDARD), Gaussian(std=noise(name), **options), **run, progress=False)
        likelihood = Gaussian(std=noise(name, UNITS[0]), standardise=True, **options)
        mapped = method.fit(network(), (INPUTS, MAPPED), likelihood, **run, progress=False)
    return plain, mapped


def close(here: Tensor, there: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(here, there, rtol=tolerance, atol=tolerance)


def same_predictions(plain, mapped, tolerance: float = 1e-9, **options) -> None:
    scale, location = UNITS
    one, other = plain.predict(NEW, 6, **options), mapped.predict(NEW, 6, **options)
    close((other.mean - location) / scale, one.mean, tolerance)
    close(other.epistemic_std / scale, one.epistemic_std, tolerance)
    close(other.aleatoric_std / scale, one.aleatoric_std, tolerance)
    close((other.quantile(0.9) - location) / scale, one.quantile(0.9), tolerance)
    targets = STANDARD[: len(NEW)]
    expected = one.log_prob(targets) - scale.log().sum()
    close(other.log_prob(targets * scale + location), expected, tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_the_same_posterior_in_other_units(name: str, tmp_path):
    plain, mapped = pair(name)
    # Eigenvectors of curvature turn with rounding; Adam divides gradients by their size.
    for key, tensor in plain.network.state_dict().items():
        close(mapped.network.state_dict()[key], tensor)
    same_predictions(plain, mapped)
    close(mapped.likelihood.std(), plain.likelihood.std() * UNITS[0])
    close(mapped.likelihood.location, UNITS[1])
    assert len(mapped.history) == len(plain.history)
    for before, after in zip(plain.history, mapped.history, strict=True):
        if "nll" in before:  # told in the targets' units
            assert after["nll"] == pytest.approx(before["nll"] + float(UNITS[0].log().sum()), rel=1e-9)
    mapped.save(tmp_path / "p.safetensors")
    loaded = dubito.load(tmp_path / "p.safetensors", network())
    assert torch.equal(loaded.predict(NEW, 4).means, mapped.predict(NEW, 4).means)
    sampled = mapped.sampled(4, seed=1)
    close(sampled.predict(NEW).mean, mapped.predict(NEW, 4, seed=1).mean, 1e-12)


def test_the_evidence_of_laplace_differs_by_the_units_alone():
    plain, mapped = pair("laplace", Laplace(structure=KFAC(), curvature=GGN()))
    constant = len(INPUTS) * float(UNITS[0].log().sum())
    assert plain.log_marginal_likelihood() == pytest.approx(mapped.log_marginal_likelihood() + constant, rel=1e-12)
    same_predictions(plain, mapped, linearised=True)
    for options in ({}, {"noise": True}, {"validation": True}):
        validation = [(INPUTS[:20], STANDARD[:20]), (INPUTS[:20], MAPPED[:20])]
        chosen = [options | ({"validation": rows} if "validation" in options else {}) for rows in validation]
        one, other = plain.tuned(**chosen[0]), mapped.tuned(**chosen[1])
        assert other.log_marginal_likelihood() + constant == pytest.approx(one.log_marginal_likelihood(), rel=1e-9)
        close(other.likelihood.std(), one.likelihood.std() * UNITS[0], 1e-6)
        assert other.prior_precision == pytest.approx(one.prior_precision, rel=1e-6)
        same_predictions(one, other, 1e-6, linearised=True)  # the search for a maximum ends where it is flat
    more = plain.update((NEW, STANDARD[:9])), mapped.update((NEW, MAPPED[:9]))
    same_predictions(*more)
    assert more[1].log_marginal_likelihood() == pytest.approx(
        more[0].log_marginal_likelihood() - constant * 49 / 40, rel=1e-12
    )


def test_outputs_of_several_rows_are_in_the_targets_units():
    plain, mapped = pair("laplace", Laplace(structure=KFAC()))
    one, other = plain.joint(NEW), mapped.joint(NEW)
    close(other.mean, one.mean * UNITS[0] + UNITS[1])
    units = UNITS[0].repeat(len(NEW))
    close(other.covariance / units / units[:, None], one.covariance)
    prediction = mapped.predict(NEW, linearised=True)
    close(other.variance / UNITS[0] ** 2, prediction.epistemic / UNITS[0] ** 2)


def test_noise_after_the_fit_is_that_of_residuals_in_the_targets_units():
    """Laplace around a network that was trained elsewhere, in standardised units."""
    trained = MAP().fit(network(), (INPUTS, STANDARD), Gaussian(), training=TRAINING, progress=False).network
    trained.requires_grad_(True)
    plain = Laplace().fit(trained, (INPUTS, STANDARD), Gaussian())
    mapped = Laplace().fit(trained, (INPUTS, MAPPED), Gaussian(standardise=True))
    residuals = MAPPED - (trained(INPUTS) * UNITS[0] + UNITS[1])
    close(mapped.likelihood.std() / UNITS[0], residuals.square().mean(0).sqrt() / UNITS[0])
    same_predictions(plain, mapped)
    assert plain.details["squared_errors"] == pytest.approx(mapped.details["squared_errors"], rel=1e-12)


@pytest.mark.parametrize("method", [MAP(), Laplace(), BALI(effective_data=40.0, output_floor=0.1)])
def test_full_covariances_are_given_in_the_targets_units(method):
    full = torch.tensor([[0.3, 0.1], [0.1, 0.2]], dtype=torch.float64)
    units = UNITS[0].diag()
    settings = [tuple(map(tuple, matrix.tolist())) for matrix in (full, units @ full @ units)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)
        plain, mapped = (
            method.fit(network(), (INPUTS, targets), likelihood, training=TRAINING, progress=False)
            for targets, likelihood in (
                (STANDARD, Gaussian(covariance=settings[0])),
                (MAPPED, Gaussian(covariance=settings[1], standardise=True)),
            )
        )
    same_predictions(plain, mapped)
    close(mapped.predict(NEW).covariances[0, 0] / UNITS[0] / UNITS[0][:, None], full)
    scaled = [temperature_scaled(*fitted) for fitted in ((plain, (INPUTS, STANDARD)), (mapped, (INPUTS, MAPPED)))]
    same_predictions(*scaled, 1e-6)


@pytest.mark.parametrize("method", [MeanField(), DeepEnsemble(members=2), Laplace()])
def test_what_follows_a_fit_keeps_the_units(method):
    plain, mapped = pair("other", method)
    scaled = [temperature_scaled(*fitted) for fitted in ((plain, (INPUTS, STANDARD)), (mapped, (INPUTS, MAPPED)))]
    same_predictions(*scaled, 1e-6)
    close(BALD().scores(mapped, NEW), BALD().scores(plain, NEW))
    lower, _ = ScaledResiduals(level=0.8).fit(mapped.predict(INPUTS), MAPPED).intervals(mapped.predict(NEW))
    expected, _ = ScaledResiduals(level=0.8).fit(plain.predict(INPUTS), STANDARD).intervals(plain.predict(NEW))
    close((lower - UNITS[1]) / UNITS[0], expected)
    fixed = mapped.sampled(4, seed=2, linearised=False)
    module = fixed.as_module()
    programs = [torch.export.export(module, (NEW,)).module()] if isinstance(method, MeanField) else []
    expected = fixed.predict(NEW)
    for answers in [module(NEW), *(program(NEW) for program in programs)]:
        close(answers["mean"] / UNITS[0], expected.mean / UNITS[0])
        close(answers["epistemic_std"] / UNITS[0], expected.epistemic_std / UNITS[0])
    drawn = mapped.sample_outputs(NEW, 3, linearised=False)
    close(mapped.likelihood.restored(drawn)[0], mapped.predict(NEW, 3, linearised=False).means[0])


class Rows(Dataset):
    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index], MAPPED[index]


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(INPUTS, MAPPED),
        Rows(),
        DataLoader(Rows(), batch_size=7, shuffle=True),
        DataLoader(Rows(), batch_size=7, sampler=list(reversed(range(40)))),
    ],
)
def test_all_targets_tell_the_units_whatever_holds_them(data):
    state = torch.random.get_rng_state()
    posterior = MAP().fit(network(), data, Gaussian(standardise=True), training=Training(epochs=1), num_data=40)
    close(posterior.likelihood.location, UNITS[1], 1e-13)
    close(posterior.likelihood.scale / UNITS[0], torch.ones(2).double(), 1e-12)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_positions_share_the_units_of_their_output():
    torch.manual_seed(0)
    images = torch.randn(6, 1, 4, 4).double()
    targets = torch.cat([images * 1e4 + 1e5, images**2 - 3], 1)
    net = nn.Conv2d(1, 2, 1).double()
    posterior = MAP().fit(net, (images, targets), Gaussian(standardise=True, std=(10.0, 0.5)), training=TRAINING)
    likelihood = posterior.likelihood
    assert likelihood.scale.shape == (2, 1, 1)
    flat = targets.transpose(0, 1).flatten(1)
    close(likelihood.scale.flatten(), flat.std(1))
    close(likelihood.std().flatten(), torch.tensor([10.0, 0.5]).double())
    outputs = posterior.network(images)
    means = outputs * flat.std(1)[:, None, None] + flat.mean(1)[:, None, None]
    close(posterior.predict(images).mean, means)
    truth = torch.distributions.Normal(means, torch.tensor([10.0, 0.5]).double()[:, None, None])
    close(likelihood.log_prob(outputs, targets), truth.log_prob(targets).flatten(1).sum(1))
    root = likelihood.hessian_root(outputs[:1])
    one = outputs[:1].detach().requires_grad_()
    hessian = torch.autograd.functional.hessian(lambda f: -likelihood.log_prob(f, targets[:1]).sum(), one)
    close((root @ root.mT)[0], hessian.reshape(32, 32), 1e-7)


def test_rows_without_an_axis_of_outputs():
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).squeeze(-1)

    for settings in (Gaussian(standardise=True), Gaussian(standardise=True, std=1e4)):
        posterior = MAP().fit(Flat(), (INPUTS, MAPPED[:, 0]), settings, training=TRAINING)
        assert posterior.predict(NEW).mean.shape == (9,)
        assert posterior.predict(NEW).mean.mean() == pytest.approx(1e6, rel=0.3)


def test_moments_of_batches_are_those_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1000, 2, 3, generator=generator).double() * 1e-3 + torch.tensor([1e9, 0.0]).double()[:, None]
    values[:, 1] = 0.1  # a constant that binary numbers do not hold
    mean, std = moments(values.split([1, 499, 500]))
    exact = values[:, 0].flatten() - 1e9  # exact: nearby numbers
    assert mean[0].item() - 1e9 == pytest.approx(math.fsum(exact.tolist()) / 3000, abs=2e-7)  # 1e9's last digit
    assert std[0].item() == pytest.approx(exact.std().item(), rel=1e-9)
    assert (mean[1].item(), std[1].item()) == (0.1, 1.0)
    _, one = moments([torch.tensor([[3.0]])])
    assert one.tolist() == [1.0]


def test_constant_targets_are_only_shifted():
    posterior = MAP().fit(
        network(), (INPUTS, torch.full_like(MAPPED, 7.0)), Gaussian(standardise=True), training=TRAINING
    )
    assert posterior.likelihood.scale.tolist() == [1.0, 1.0]
    assert posterior.likelihood.location.tolist() == [7.0, 7.0]


def test_large_targets_in_single_precision():
    inputs, targets = INPUTS.float(), MAPPED[:, :1].float()
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    fitted = MAP().fit(net, (inputs, targets), Gaussian(standardise=True), training=Training(iterations=200, lr=3e-2))
    constant = targets.std()
    assert fitted.evaluate((inputs, targets))["rmse"] < 0.5 * constant


def test_own_loops_are_told_to_standardise():
    with pytest.raises(ConfigError, match="loop of your own"):
        MAP().build(network(), Gaussian(standardise=True), num_data=4)
    with pytest.raises(ConfigError, match="standardise must be True or False"):
        Gaussian(standardise="yes")  # pyright: ignore[reportArgumentType]


def test_the_fit_leaves_the_likelihood_of_others_alone():
    settings = Gaussian(standardise=True)
    first = MAP().fit(network(), (INPUTS, MAPPED), settings, training=TRAINING)
    before = copy.deepcopy(first.likelihood.state_dict())
    MAP().fit(network(), (INPUTS, STANDARD), settings, training=TRAINING)
    assert all(torch.equal(first.likelihood.state_dict()[name], value) for name, value in before.items())

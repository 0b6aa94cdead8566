"""The scale of a posterior, chosen on validation rows, and the paired rule behind it."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dubito import MAP, Categorical, ConfigError, DataError, Gaussian, Laplace, MeanField, Training
from dubito.calibration import chosen_scale, paired_gain, posterior_scaled
from dubito.calibration.scale import SCALES, preferred_scale
from dubito.posterior import Posterior


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_gains_are_paired():
    reference, losses = normal(50, seed=0), normal(50, seed=1) / 10
    losses = reference - 0.2 + losses  # rows differ by far more than the losses of a row
    gain, error = paired_gain(losses, reference)
    difference = (reference - losses).double()
    mean = sum(difference.tolist()) / 50
    squares = sum((value - mean) ** 2 for value in difference.tolist())
    assert gain == pytest.approx(mean) and error == pytest.approx(math.sqrt(squares / 49 / 50))
    assert paired_gain(reference, losses) == (pytest.approx(-gain), pytest.approx(error))


def test_gains_of_one_row_and_of_losses_that_are_not_finite():
    one, bad = torch.tensor([1.0]), torch.tensor([1.0, math.inf])
    assert paired_gain(one, one + 1) == (1.0, math.inf)
    fine = torch.tensor([5.0, 5.0])
    assert paired_gain(fine, bad) == (math.inf, 0.0)
    assert paired_gain(bad, fine) == (-math.inf, 0.0)
    assert paired_gain(bad, torch.tensor([math.nan, 0.0])) == (0.0, 0.0)
    for losses, reference in ((one, fine), (fine[:0], fine[:0]), (fine[None], fine[None])):
        with pytest.raises(DataError, match="same rows"):
            paired_gain(losses, reference)


def shifted(**gains: float) -> dict[float, Tensor]:
    """Losses that gain so many standard errors on those of scale 1, each on its own."""
    base = normal(100, seed=0)
    unit = torch.tensor([1.0, -1.0]).repeat(50)
    unit = unit / (unit.std() / 10)  # of standard error 1 over 100 rows
    losses = {1.0: base}
    for name, gain in gains.items():
        losses[float(name.removeprefix("s").replace("_", "."))] = base - gain + unit
    return losses


def test_the_scale_stays_unless_another_gains_a_standard_error():
    assert preferred_scale(shifted(s0_3=0.95, s3=0.5)) == 1
    assert preferred_scale(shifted(s0_3=1.05, s3=0.5)) == 0.3
    assert preferred_scale(shifted(s0_1=1.05, s0_3=1.5, s3=1.2)) == 0.3  # the least mean loss of those that win
    assert preferred_scale({1.0: normal(5, seed=0)}) == 1


def test_zero_is_the_last_resort():
    assert preferred_scale(shifted(s0=5.0)) == 0
    assert preferred_scale(shifted(s0=0.95)) == 1


def test_zero_must_win_against_every_other_scale():
    base = normal(100, seed=0)
    wobble = torch.tensor([1.0, -1.0]).repeat(50)
    losses = {0.0: base - 5, 0.1: base - 5 + wobble, 1.0: base}
    assert preferred_scale(losses) == 0.1  # as good as 0, but for chance
    losses[0.1] = base - 4 + wobble
    assert preferred_scale(losses) == 0  # worse than 0 by ten standard errors
    assert preferred_scale({**losses, 0.0: base + math.nan}) == 0.1


def wide() -> tuple[Posterior, tuple[Tensor, Tensor]]:
    """A regression whose posterior is far too wide, and rows to judge it by."""
    x = normal(200, 3, seed=0)
    y = x.sum(1, keepdim=True) + 0.1 * normal(200, 1, seed=1)
    settings = Training(epochs=60, batch_size=50, lr=2e-2)
    posterior = Laplace(prior_precision=1.0).fit(nn.Linear(3, 1), (x[:100], y[:100]), Gaussian(), training=settings)
    return posterior.scaled(30), (x[100:], y[100:])


@pytest.mark.parametrize("linearised", [True, False])
def test_a_posterior_that_is_too_wide_is_narrowed(linearised: bool):
    posterior, rows = wide()
    losses = {
        scale: -posterior.scaled(scale).predict(rows[0], linearised=linearised).log_prob(rows[1]) for scale in SCALES
    }
    scale = chosen_scale(posterior, rows, linearised=linearised)
    assert scale == preferred_scale(losses) < 1
    loader = DataLoader(TensorDataset(*rows), batch_size=17, shuffle=True)
    assert chosen_scale(posterior, loader, linearised=linearised, seed=0) == scale  # rows are paired all the same
    chosen = posterior_scaled(posterior, rows, linearised=linearised)
    assert chosen.scale == 30 * scale and posterior.scale == 30
    assert -chosen.predict(rows[0], linearised=linearised).log_prob(rows[1]).mean() < losses[1.0].mean()


def test_a_posterior_that_is_right_stays():
    posterior, rows = wide()
    right = posterior.scaled(1 / 30)
    assert right.scale == pytest.approx(1)
    assert chosen_scale(right, rows, scales=(10.0, 30.0), linearised=True) == 1


def test_classes_and_refusals():
    x = normal(60, 3, seed=0)
    data = x, (x[:, 0] > 0).long()
    net, settings = nn.Linear(3, 2), Training(epochs=5, batch_size=20)
    posterior = MeanField().fit(net, data, Categorical(), training=settings)
    assert posterior_scaled(posterior, data, scales=(0.5, 2.0), num_samples=4).scale in (0.5, 1.0, 2.0)
    with pytest.raises(ConfigError, match="scale must be"):
        chosen_scale(posterior, data, scales=(-1.0,))
    point = MAP().fit(net, data, Categorical(), training=settings)
    with pytest.raises(ConfigError, match="such as Laplace"):
        posterior_scaled(point, data)

"""What BALI chooses by rows kept from training: nothing far from the run that chooses, nothing by chance."""

import math

import torch
from torch import Tensor, nn

from dubito import BALI, Categorical, Training
from dubito.inference.bali.choose import REACH, SHARES, near, preferred
from dubito.prediction import CategoricalPrediction


def rows(mean: float, spread: float) -> Tensor:
    """A hundred scores with just this mean and standard deviation."""
    return mean + spread * torch.tensor([1.0, -1.0]).repeat(50)


def test_only_effective_data_near_those_of_the_run_are_tried() -> None:
    tried = [share * 1032 for share in SHARES if near(share * 1032, 1032.0)]
    assert tried == [516.0, 258.0]  # ten of them looked best on digits, and a fit with ten fell to 39 %
    assert near(8000.0, 2000.0) and not near(8001.0, 2000.0) and not near(2000.0, 2000.0)
    assert math.isclose(REACH, 4.0)


def test_the_runs_own_are_kept_unless_others_are_surely_better() -> None:
    own = 1 + torch.arange(100) / 50
    chance = own + rows(-0.01, 0.5)  # lower by less than its standard error of 0.05
    assert chance.mean() < own.mean() and preferred(own, [chance]) == 0
    better, best = own - 0.1, own + rows(-0.3, 0.2)
    assert preferred(own, [chance, better]) == 2
    assert preferred(own, [better, best, chance]) == 2
    assert preferred(own, [own + 0.1]) == 0
    assert preferred(own, []) == 0


def test_what_cannot_be_judged_is_left() -> None:
    own, broken = rows(1.0, 0.5), torch.full((100,), math.inf)
    assert preferred(own, [broken]) == 0
    assert preferred(broken, [own]) == 1
    assert preferred(broken, [broken]) == 0


def test_a_classifier_keeps_its_effective_data_near_its_rows() -> None:
    """Classes that are easy to tell apart: whatever their number, judging rows see no difference."""
    stream = torch.Generator().manual_seed(0)
    labels = torch.arange(160) % 4
    inputs = 3 * nn.functional.one_hot(labels, 4).float() + 0.3 * torch.randn(160, 4, generator=stream)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    posterior = BALI(step_size=0.1, update_rate=0.1, prior_scale=10.0).fit(
        net, (inputs, labels), Categorical(), training=Training(iterations=150, batch_size=64), progress=False
    )
    assert 160 / REACH <= posterior.method.effective_data <= 160
    prediction = posterior.predict(inputs)
    assert isinstance(prediction, CategoricalPrediction)
    assert (prediction.labels == labels).float().mean() > 0.95


def test_one_row_far_off_does_not_decide_for_all() -> None:
    """A wide floor serves one row of 28 by 20 nats and costs every other 0.3: its mean is lower all the same."""
    narrow = torch.zeros(28)
    narrow[5] = 20.0
    wide = torch.full((28,), 0.3)
    assert wide.mean() < narrow.mean() and preferred(narrow, [wide]) == 0
    noisy = torch.arange(28) / 14  # where many rows are served, it is taken
    assert preferred(noisy, [wide]) == 1

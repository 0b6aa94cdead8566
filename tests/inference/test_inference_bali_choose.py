"""What BALI chooses by rows that join its run late: nothing far from the run's own, nothing by chance."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dubito import BALI, Categorical, Gaussian, Training
from dubito.inference.bali.choose import BEFORE, REACH, SHARES, WithheldRows, climbed, near, preferred
from dubito.inference.bali.stepper import BALIStepper
from dubito.inputs import Batch
from dubito.prediction import CategoricalPrediction
from dubito.sources import TensorSource


def rows(mean: float, spread: float) -> Tensor:
    """A hundred scores with just this mean and standard deviation."""
    return mean + spread * torch.tensor([1.0, -1.0]).repeat(50)


def test_only_effective_data_near_those_of_the_run_are_tried() -> None:
    tried = [share * 1032 for share in SHARES if near(share * 1032, 1032.0)]
    assert tried == [258.0, 516.0]  # ten of them looked best on digits, and a fit with ten fell to 39 %
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


def test_a_setting_moves_until_it_leads_uphill() -> None:
    asked: list[float] = []

    def scores(settings: BALI) -> Tensor:
        assert settings.output_floor is not None
        asked.append(settings.output_floor)
        return rows(abs(math.log10(settings.output_floor) + 1), 0.1)

    values = (1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
    best = climbed(BALI(output_floor=1e-4), "output_floor", values, scores)
    assert best.output_floor == 0.1  # the lowest of all is found
    assert asked == [1e-4, 1e-5, 1e-3, 1e-2, 3e-2, 0.1, 0.3]  # and nothing beyond a step uphill is tried


# -- in the run --------------------------------------------------------------------------------------------------------


def table(count: int = 120) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, generator=stream)
    return x, x[:, :1].sin() + 0.1 * torch.randn(count, 1, generator=stream)


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def test_withheld_rows_do_not_train_until_they_are_released() -> None:
    source = WithheldRows(TensorSource(Batch(torch.arange(120.0)[:, None], torch.arange(120.0))), seed=3)
    judging = {float(row) for row in source.judging}
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1)).split(16)

    def read() -> list[float]:
        batches = [batch for batch in source.read(order) if batch is not None]
        assert [len(batch.targets) for batch in batches] == [len(group) for group in order]
        return torch.cat([batch.targets for batch in batches]).tolist()

    assert len(judging) == 12 and not judging & set(read())
    (judges,) = source.judges(64)
    assert set(judges.targets.tolist()) == judging
    source.release()
    assert read() == torch.cat(order).float().tolist()


@pytest.mark.parametrize("stop", [5, 37])
def test_a_run_that_chose_goes_on_from_its_checkpoint(tmp_path, monkeypatch, stop: int) -> None:
    """Before and after the choice, which comes with the first epoch that ends behind seven tenths of the run."""
    data, training = (table(), Training(iterations=40, batch_size=40, checkpoint_minutes=0.0))  # epochs of 3 steps
    read: list[tuple[int, Tensor]] = []
    step = BALIStepper.step

    def spied(self, number, passes, *rest):
        read.append((number, passes[0].targets))
        if number == stop and stopping:
            raise KeyboardInterrupt
        return step(self, number, passes, *rest)

    monkeypatch.setattr(BALIStepper, "step", spied)
    stopping = False
    whole = BALI().fit(net(), data, Gaussian(), training=training, seed=3)
    late = math.ceil(math.ceil(BEFORE * 40) / 3) * 3
    targets = data[1][WithheldRows(TensorSource(Batch(*data)), 3).judging]
    seen = [number for number, rows in read if torch.isin(rows, targets).any()]
    assert min(seen) == late and {int(number) for number in seen} == set(range(late, 40))
    assert whole.method.effective_data is not None and whole.method.output_floor is not None
    assert set(whole.details["effective_data"].values()) == {whole.method.effective_data}
    stopping = True
    with pytest.raises(KeyboardInterrupt):
        BALI().fit(net(), data, Gaussian(), training=training, checkpoint=tmp_path / "c", seed=3)
    stopping = False
    again = BALI().fit(net(), data, Gaussian(), training=training, checkpoint=tmp_path / "c", seed=3)
    assert again.method == whole.method
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_chosen_floor_is_that_of_the_result(monkeypatch) -> None:
    data, training = table(), Training(iterations=30, batch_size=40)
    monkeypatch.setattr("dubito.inference.bali.choose.FLOORS", (1e-4, 1.0))
    monkeypatch.setattr("dubito.inference.bali.choose.preferred", lambda present, others: len(others))
    method = BALI(effective_data=120.0)
    chosen = method.fit(net(), data, Gaussian(), training=training)
    alone = replace(method, output_floor=1e-4).fit(net(), data, Gaussian(), training=training)
    assert chosen.method == replace(method, output_floor=1.0)
    least = data[1].std(unbiased=False) * math.sqrt(120 / 122)  # U_0 / (u + D_y + 1), and what is left over
    assert float(alone.likelihood.std()) < float(least) < float(chosen.likelihood.std())

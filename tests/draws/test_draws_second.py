"""Draws of networks whose layers hold the rows second: no pass may mix one draw's factors with another's rows."""

import pytest
import torch
from torch import Tensor, nn

from dubito import BatchEnsemble, Gaussian, MCDropout, Rank1, Training

pytestmark = pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")


class TimeMajor(nn.Module):
    """Positions first, rows second."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, hidden), nn.Linear(hidden, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs.transpose(0, 1)).relu()).mean(0)


INPUTS = torch.randn(24, 6, 4, generator=torch.Generator().manual_seed(0))
METHODS = [BatchEnsemble(), Rank1(components=2), MCDropout(rate=0.3)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_programs_without_a_trial_are_right(method) -> None:
    training = Training(iterations=20, batch_size=24, lr=0.05)
    posterior = method.fit(TimeMajor(), (INPUTS, INPUTS[:, :, :2].sum(1)), Gaussian(std=0.5), training=training)
    module = posterior.sampled(4).as_module()
    truth = posterior.sampled(4).predict(INPUTS[:6])
    program = torch.export.export(module, (INPUTS[:6],), strict=False).module()
    for answer in (module(INPUTS[:6]), program(INPUTS[:6])):
        torch.testing.assert_close(answer["mean"], truth.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(answer["epistemic_std"], truth.epistemic_std, rtol=1e-4, atol=1e-5)


def test_draws_that_are_alike_by_chance_teach_nothing() -> None:
    """Few masks of narrow layers coincide: a trial on them would pass whatever the pass does."""
    posterior = MCDropout(rate=0.1).fit(
        TimeMajor(4), (INPUTS, INPUTS[:, :, :2].sum(1)), Gaussian(std=0.5), training=Training(iterations=5)
    )
    truth = torch.stack([posterior.fold(s, seed=1)(INPUTS) for s in range(32)]).mean(0)
    for seed in range(12):
        posterior.predict(INPUTS[:5], num_samples=2, seed=seed)
        torch.testing.assert_close(posterior.predict(INPUTS, 32, seed=1).mean, truth, rtol=1e-4, atol=1e-5)

"""A parameter without axes, such as a learned scale of logits, under every method."""

import pytest
import torch
from torch import nn

from dubito import SWAG, Categorical, DubitoError, Training, methods

METHODS = {**methods(), "swag": SWAG(snapshots=4, rank=2)}


class Scaled(nn.Module):
    """Logits times a learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last, self.scale = nn.Linear(4, 6), nn.Linear(6, 2), nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.hidden(inputs))) * self.scale


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")  # of runs that are this short
@pytest.mark.parametrize("name", [name for name in METHODS if name != "deep-ensemble"])
def test_scalars_are_drawn_and_predicted_with(name: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(32, 4)
    rows = inputs, (inputs[:, 0] > 0).long()
    posterior = METHODS[name].fit(Scaled(), rows, Categorical(), training=Training(epochs=2, batch_size=16))
    prediction = posterior.predict(inputs, 4)
    assert prediction.probs.isfinite().all()
    assert torch.equal(posterior.predict(inputs, 4).probs, prediction.probs)
    assert posterior.fold(1)(inputs).shape == (32, 2)
    assert posterior.sample_outputs(inputs, 3).shape == (3, 32, 2)


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
def test_members_that_cannot_start_anew_are_refused() -> None:
    with pytest.raises(DubitoError, match="scale"):
        METHODS["deep-ensemble"].fit(Scaled(), (torch.randn(8, 4), torch.zeros(8).long()), Categorical())

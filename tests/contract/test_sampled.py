"""Draws made once by every registered method are those of `predict`, by PyTorch alone."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from dubito.inputs import call
from dubito.posterior import Posterior

from .cases import METHODS, Case, fitted

pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")
every_method = pytest.mark.parametrize("method", METHODS)
SEED = 3


def written_out(posterior: Posterior, case: Case, count: int) -> Tensor:
    """The outputs of draws, one network of weights after the other, [S, B, C]."""
    buffers, outputs = dict(posterior.network.named_buffers()), []
    for index in range(count):
        weights = {**buffers, **posterior.draw(index, posterior.generator(SEED, index))}
        outputs.append(call(lambda *a, w=weights, **k: functional_call(posterior.network, w, a, k), case.inputs))
    return torch.stack(outputs).detach()


@every_method
@pytest.mark.parametrize("network", ["mlp", "convolutional", "lstm", "attention", "dict", "shared"])
def test_draws_made_once_are_the_draws(method: str, network: str) -> None:
    posterior, case = fitted(method, network)
    fixed = posterior.sampled(6, seed=SEED)
    count = posterior.num_atoms or -(-6 // posterior.num_components) * posterior.num_components
    assert fixed.num_samples == fixed.num_atoms == count
    truth = written_out(posterior, case, count)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(fixed.sample_outputs(case.inputs, count), truth, **close)
    assert all(way >= 0 for way in fixed._ways.values())  # in one pass
    torch.testing.assert_close(torch.stack(list(fixed.together.outputs(case.inputs, 5))), truth, **close)  # one by one
    prediction = fixed.predict(case.inputs)
    torch.testing.assert_close(prediction.probs, truth.softmax(-1).mean(0), **close)
    fresh = posterior.predict(case.inputs, 6, seed=SEED, **({"linearised": False} if "laplace" in method else {}))
    for name in ("probs", "total", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(prediction, name), getattr(fresh, name), **close)
    last = posterior.function(count - 1, SEED)
    torch.testing.assert_close(last(case.inputs), truth[-1], **close)
    torch.testing.assert_close(call(fixed.fold(count - 1), case.inputs).detach(), truth[-1], **close)

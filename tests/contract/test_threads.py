"""Every registered method answers from several threads at once what it answers from one, bit for bit."""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dubito import Categorical, DubitoWarning, Training
from dubito.inputs import take

from .cases import METHODS, fitted, make, rows

THREADS, JOBS = 8, 24
every_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(autouse=True)
def switching() -> Iterator[None]:
    """Threads take turns every 0.1 ms, and not where it happens to do no harm."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@cache
def posterior_of(method: str, network: str = "mlp"):
    return fitted(method, network)


def tensors_of(result: Any) -> list[Tensor]:
    """Everything a result says, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, nn.Module):
        return [tensor.detach() for tensor in result.state_dict().values()]
    if isinstance(result, dict):
        return [torch.tensor(list(result.values()), dtype=torch.float64)]
    return [result.probs, result.aleatoric, result.epistemic]


def equal(one: Any, other: Any) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def crew() -> ThreadPoolExecutor:
    """Threads that divide products as the main one does: PyTorch gives each its own number, which decides rounding."""
    return ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))


def same_from_threads(work: Callable[[int], Any], jobs: int = JOBS) -> None:
    """Each job gives in a crowd what it gave alone, and the global generator stays where it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)
        alone = [work(job) for job in range(4)]
        state = torch.get_rng_state()
        with crew() as threads:
            crowd = list(threads.map(lambda job: work(job % 4), range(jobs)))
    wrong = [job for job, result in enumerate(crowd) if not equal(result, alone[job % 4])]
    assert not wrong, f"{len(wrong)} of {jobs} answers differ"
    assert torch.equal(torch.get_rng_state(), state)


def unchanged(posterior: nn.Module) -> Callable[[], None]:
    """A check that a posterior is as it was: tensors, and the network's modes, flags, hooks and attributes."""

    def facts() -> list[Any]:
        flags = [p.requires_grad for p in posterior.parameters()]
        network = getattr(posterior, "network", posterior)
        each = ((m.training, *m._forward_hooks, *m._forward_pre_hooks, *vars(m)) for m in network.modules())
        return [*flags, *each]

    state, before = copy.deepcopy(posterior.state_dict()), facts()

    def check() -> None:
        for name, tensor in posterior.state_dict().items():
            assert torch.equal(tensor, state[name]), name
        assert facts() == before

    return check


@every_method
@pytest.mark.parametrize("network", ["mlp", "convolutional"])
def test_predictions_evaluations_draws_and_folds(method: str, network: str):
    posterior, case = posterior_of(method, network)
    check = unchanged(posterior)
    same_from_threads(lambda job: posterior.predict(take(case.inputs, slice(job, job + 3)), 4, seed=job))
    same_from_threads(lambda job: posterior.sample_outputs(take(case.inputs, slice(job + 1)), 3, seed=job))
    data = case.inputs, case.targets
    same_from_threads(lambda job: posterior.evaluate(data, num_samples=2, seed=job), 8)
    same_from_threads(lambda job: posterior.fold(job, seed=job), 8)
    check()


OPTIONS = {
    "linearised": ("laplace",),
    "marginal": ("mean-field", "k-tied"),
    "per_example": ("rank1", "implicit", "batch-ensemble"),
}
PAIRS = [(m, option) for option, names in OPTIONS.items() for m in METHODS if m.startswith(names)]


@pytest.mark.parametrize(("method", "option"), PAIRS)
def test_predictions_in_other_forms(method: str, option: str):
    posterior, case = posterior_of(method)
    check = unchanged(posterior)
    same_from_threads(
        lambda job: posterior.predict(take(case.inputs, slice(job, job + 3)), 4, seed=job, **{option: True})
    )
    check()


class Noisy(nn.Module):
    """Draws from the global generator in evaluation mode too, and has dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, 17), nn.Dropout(0.5), nn.Linear(17, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.body(x)))
        return self.head(hidden + 0.1 * torch.randn_like(hidden))


@pytest.mark.parametrize("method", ["map", "mean-field", "deep-ensemble"])
def test_networks_that_draw_from_the_global_generator(method: str):
    case = make("mlp")
    data, quick = (case.inputs, case.targets), Training(epochs=1, batch_size=6)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Noisy()
    posterior = METHODS[method].fit(net, data, Categorical(), training=quick)
    check = unchanged(posterior)
    first = posterior.sample_outputs(case.inputs, 8, seed=0)
    assert not torch.equal(first, posterior.sample_outputs(case.inputs, 8, seed=1))
    same_from_threads(lambda job: posterior.predict(case.inputs, 4, seed=job))
    check()
    same_from_threads(lambda job: METHODS[method].fit(net, data, Categorical(), training=quick, seed=job), 8)


@every_method
def test_fits(method: str):
    case = make("mlp")
    net = nn.Sequential(case.net[0], case.net[1], nn.Dropout(0.3), case.net[2])
    data, quick = (case.inputs, case.targets), Training(epochs=1, batch_size=6)
    check = unchanged(net)
    same_from_threads(lambda job: METHODS[method].fit(net, data, Categorical(), training=quick, seed=job), 8)
    check()


def test_a_fit_beside_predictions():
    """Fits put the global generator aside while others predict."""
    posterior, case = posterior_of("mc-dropout")
    net = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.5), nn.Linear(9, 3))
    data, quick = (case.inputs, case.targets), Training(epochs=1, batch_size=6)

    def work(job: int):
        if job % 2:
            return METHODS["map"].fit(net, data, Categorical(), training=quick, seed=job)
        return posterior.predict(rows((3, 4)), 4, seed=job)

    same_from_threads(work, 16)

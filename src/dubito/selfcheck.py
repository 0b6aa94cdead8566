"""A part of the contract, run on any device within two minutes: does every method do there what it does on a CPU?

Generators of devices give other draws than that of the CPU, so two fits cannot be compared. A posterior is fitted on
the device and must answer; another is fitted on the CPU and copied to the device, where its predictions must be those
of the CPU: to rounding where nothing is drawn, and within Monte Carlo error where it is.
"""

import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import ConfigError, DubitoWarning
from .likelihoods import Categorical
from .loading import load
from .method import Method
from .networks import duplicate
from .posterior import Posterior
from .prediction import CategoricalPrediction
from .training import Training

ROWS, FEATURES, CLASSES, DRAWS = 96, 6, 3, 256
TRAINING = Training(epochs=3, batch_size=16, lr=1e-2)
#: The most: rounding between devices, standard errors between means of draws, the factor between their deviations.
ROUNDING, ERRORS, FACTOR = 1e-3, 6.0, 1.5


class CheckResult(NamedTuple):
    """What one check of one method gave: whether it held, with a figure or what went wrong, and the seconds it took."""

    method: str
    check: str
    passed: bool
    detail: str
    seconds: float


def usable(name: str | None) -> torch.device:
    """The device of a name, or the accelerator that is here, or the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        told = str(error).splitlines()[0]
        raise ConfigError(f"device must be one that PyTorch finds here, got {name!r}: {told}") from error


def selfcheck(device: torch.device, methods: Mapping[str, Method]) -> Iterator[CheckResult]:
    """All checks of some methods by name, one after the other."""
    for name, method in methods.items():
        checks = MethodChecks(method, device)
        for words, check in CHECKS.items():
            start = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DubitoWarning)  # so little training shows
                    detail, passed = check(checks), True
            except Exception as error:
                detail, passed = " ".join(f"{type(error).__name__}: {error}".split()), False
            if detail:
                yield CheckResult(name, words, passed, detail, round(time.perf_counter() - start, 2))


class MethodChecks:
    """The checks of a method on a device; they return a figure, nothing where they do not apply, or raise."""

    def __init__(self, method: Method, device: torch.device) -> None:
        self.method, self.device = method, device
        stream = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(ROWS, FEATURES, generator=stream)
        noise = torch.randn(ROWS, CLASSES, generator=stream)
        self.targets = (2 * self.inputs[:, :CLASSES] + noise).argmax(1)
        self.there = self.inputs.to(device)

    @cached_property
    def reference(self) -> Posterior:
        """Fitted on the CPU."""
        return self.method.fit(network(), (self.inputs, self.targets), Categorical(), training=TRAINING)

    @cached_property
    def copy(self) -> Posterior:
        """The same on the device."""
        return duplicate(self.reference).to(self.device)

    def fit(self) -> str:
        """A fit on the device predicts finite numbers there."""
        placed = network().to(self.device)
        posterior = self.method.fit(placed, (self.there, self.targets), Categorical(), training=TRAINING)
        probs = probs_of(posterior, self.there, 8)
        if probs.device.type != self.device.type:
            raise ValueError(f"the prediction lies on {probs.device}")
        return within(float((probs.sum(1) - 1).abs().max()), ROUNDING, "sums of probabilities less 1")

    def centre(self) -> str:
        """The centre of the posterior answers as on the CPU, and so do its atoms where they are finitely many."""
        pairs = [(self.copy.network(self.there), self.reference.network(self.inputs))]
        if self.reference.num_atoms is not None:
            pairs.append((probs_of(self.copy, self.there), probs_of(self.reference, self.inputs)))
        return within(max(gap(*pair) for pair in pairs), ROUNDING)

    def draws(self) -> str | None:
        """Outputs of other draws have the mean and the standard deviation that they have on the CPU."""
        if self.reference.num_atoms is not None:
            return None
        there = self.copy.sample_outputs(self.there, DRAWS, seed=1).cpu()
        here = self.reference.sample_outputs(self.inputs, DRAWS)
        error = ((there.var(0) + here.var(0)) / DRAWS).sqrt() + ROUNDING
        within(float((there.std(0) / here.std(0)).log().abs().median().exp()), FACTOR, "factor of deviations")
        apart = (there.mean(0) - here.mean(0)).abs() / error
        return within(float(apart.max()), ERRORS, "standard errors between means")

    def linearised(self) -> str | None:
        """The prediction in closed form is that of the CPU."""
        if not self.reference.has_form("linearised"):
            return None
        there = probs_of(self.copy, self.there, linearised=True)
        return within(gap(there, probs_of(self.reference, self.inputs, linearised=True)), ROUNDING)

    def repeated(self) -> str:
        """The same seed gives the same numbers, also from a file, and another seed gives others."""
        with tempfile.TemporaryDirectory() as folder:
            self.copy.save(Path(folder) / "posterior")
            loaded = load(Path(folder) / "posterior", network().to(self.device))
        calls = (self.copy, 1), (self.copy, 1), (loaded, 1), (self.copy, 2)
        draws = {"linearised": False} if self.reference.has_form("linearised") else {}
        first, again, stored, other = (probs_of(p, self.there, 8, seed=seed, **draws).cpu() for p, seed in calls)
        if self.reference.num_atoms is None and torch.equal(first, other):
            raise ValueError("another seed gives the same draws")
        return within(max(gap(first, again), gap(first, stored)), 1e-6)

    def unwaited(self) -> str | None:
        """A prediction from inputs of the device makes the host wait for nothing, by PyTorch's own count."""
        if self.device.type != "cuda":
            return None
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.copy.predict(self.there, 8, seed=3)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return "no synchronisation"


CHECKS = {
    "fit": MethodChecks.fit,
    "centre as on the CPU": MethodChecks.centre,
    "draws as on the CPU": MethodChecks.draws,
    "linearised as on the CPU": MethodChecks.linearised,
    "same seed, saved and loaded": MethodChecks.repeated,
    "predicts without waiting": MethodChecks.unwaited,
}


def network() -> nn.Module:
    """A small network, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def probs_of(posterior: Posterior, inputs: Tensor, num_samples: int = 32, **options: Any) -> Tensor:
    """Probabilities of the classes."""
    prediction = posterior.predict(inputs, num_samples, **options)
    assert isinstance(prediction, CategoricalPrediction)
    return prediction.probs


def gap(there: Tensor, here: Tensor) -> float:
    """The largest difference."""
    return float((there.detach().cpu() - here.detach()).abs().max())


def within(value: float, most: float, words: str = "largest difference") -> str:
    """The figure in words; raises where it is too large or no number."""
    if not value <= most:
        raise ValueError(f"{words}: {value:.3g}, at most {most:g} is right")
    return f"{words}: {value:.2g}"

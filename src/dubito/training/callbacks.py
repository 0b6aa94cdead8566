"""Callbacks: what a run tells those who watch it, its progress bar among them."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from ..errors import ConfigError, Interrupted

NAMES = "on_start", "on_step", "on_epoch", "on_validation", "on_end"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run that callbacks are told of.

    Attributes:
        title: what is trained or fitted, as its class is called.
        total: steps of the run; None where unknown, or where it makes none.
        done: steps that were made before, by the run that this one resumes.
        member: its number where it is one of an ensemble's, else None.
        validates: whether validation rows watch over it.
    """

    title: str
    total: int | None = None
    done: int = 0
    member: int | None = None
    validates: bool = False


class Callback:
    """Base of callbacks, which do nothing; an object that has only some of these methods is one too.

    They are called in the fit's own thread, in the first of several processes, and are no part of checkpoints: a
    resumed run goes on with those it is given, from the step after the last that was saved. What they raise ends the
    fit as any error does.
    """

    def on_start(self, run: RunFacts) -> None:
        """Before the first step of a run."""

    def on_step(self, run: RunFacts, step: int, terms: Mapping[str, float]) -> None:
        """After a step, when the next has been queued, so that no step waits for the device.

        Args:
            run: the run.
            step: how many steps were made when these terms were computed.
            terms: `loss`, `nll`, `kl` and `lr`.
        """

    def on_epoch(self, run: RunFacts, record: Mapping[str, float]) -> None:
        """After an epoch, with its record in `posterior.history`."""

    def on_validation(self, run: RunFacts, step: int, nll: float) -> None:
        """After the validation rows were judged, with the mean of their negative log-likelihoods."""

    def on_end(self, run: RunFacts, ended: str) -> None:
        """At the end, also where an error was the end: once for each `on_start`.

        Args:
            run: the run.
            ended: "limit", "patience" or "budget"; "interrupted", or "failed" by any other exception.
        """


def require_callbacks(callbacks: Iterable[Any]) -> tuple[Any, ...]:
    """The callbacks as a tuple, or an error where something else was given."""
    given = (callbacks,) if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable) else callbacks
    given = tuple(given)
    for item in given:
        if isinstance(item, type) or not any(callable(getattr(item, name, None)) for name in NAMES):
            raise ConfigError(
                f"callbacks must be a list of objects with methods such as on_step, got {item!r}; derive them from "
                "dubito.Callback and give instances"
            )
    return given


class Told:
    """Those who watch one run; open while it lasts.

    Args:
        run: what they are told of.
        callbacks: those who watch.
    """

    def __init__(self, run: RunFacts, callbacks: Iterable[Any]) -> None:
        self.run, self.callbacks, self.ended = run, tuple(callbacks), "limit"
        self._open = ExitStack()

    def __enter__(self) -> Self:
        try:
            for callback in self.callbacks:
                self._call(callback, "on_start")
                self._open.callback(lambda some=callback: self._call(some, "on_end", self.ended))
        except BaseException:
            self.ended = "failed"
            self._open.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self.ended = "interrupted" if issubclass(kind, Interrupted | KeyboardInterrupt) else "failed"
        self._open.close()

    def step(self, step: int, terms: Mapping[str, float]) -> None:
        """A step was made."""
        self._all("on_step", step, terms)

    def epoch(self, record: Mapping[str, float]) -> None:
        """An epoch has ended."""
        self._all("on_epoch", {**record})

    def validation(self, step: int, nll: float) -> None:
        """Validation rows were judged."""
        self._all("on_validation", step, nll)

    def _all(self, name: str, *values: Any) -> None:
        for callback in self.callbacks:
            self._call(callback, name, *values)

    def _call(self, callback: Any, name: str, *values: Any) -> None:
        method = getattr(callback, name, None)
        if method is not None:
            method(self.run, *values)

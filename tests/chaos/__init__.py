"""Campaigns against the library: kills, mutated files, bad calls, threads, full disks, dying processes.

A campaign is a module here with `run(size, seed) -> Report`: `size` 1.0 is the whole of it, as `make chaos` runs it;
the tests of `make test` run a small part. Cases are drawn from the seed alone, so that a failure can be made again.
"""

from collections import Counter
from dataclasses import dataclass, field

#: Modules of this package, in the order they are run.
CAMPAIGNS = ("calls", "threads", "files", "disk", "kills", "processes")


@dataclass
class Report:
    """What a campaign counted.

    Attributes:
        outcomes: how many cases ended in which way, in words ("own error", "equal bits", "foreign error").
        failures: one line for each case that must not happen, with what makes it again.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """How many cases were tried."""
        return sum(self.outcomes.values())

    def count(self, outcome: str, failure: str | None = None) -> None:
        """Count a case, and what was wrong with it."""
        self.outcomes[outcome] += 1
        if failure is not None:
            self.failures.append(failure)

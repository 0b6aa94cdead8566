"""Cells that failed, with the reason: a queue tries a cell twice at most, until its settings or the code change."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dubito.storage import write_text

#: How often a cell is tried in all.
ATTEMPTS = 2


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How often a cell failed, and why the last time.

    Attributes:
        reason: in words.
        attempts: how often it was tried.
        settings_sha256: the checksum of its settings.
        commit: of the code; None without a repository.
    """

    reason: str
    attempts: int
    settings_sha256: str
    commit: str | None


class Failures:
    """Marks of failed cells, one small file each.

    Args:
        folder: of the marks, the same for all queues.
        commit: of the code that runs now; marks of other commits no longer count.
    """

    def __init__(self, folder: Path, commit: str | None) -> None:
        self.folder, self.commit = folder, commit

    def read(self, name: Path, digest: str) -> Failure | None:
        """The mark of a cell; None where there is none, or one of other settings or of another commit.

        Args:
            name: of the mark below the folder.
            digest: the checksum of the cell's settings.
        """
        try:
            failure = Failure(**json.loads((self.folder / name).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return failure if (failure.settings_sha256, failure.commit) == (digest, self.commit) else None

    def add(self, name: Path, digest: str, reason: str) -> Failure:
        """Mark a cell as failed once more."""
        before = self.read(name, digest)
        attempts = 1 + (before.attempts if before else 0)
        failure = Failure(reason=reason, attempts=attempts, settings_sha256=digest, commit=self.commit)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(asdict(failure), indent=1) + "\n")
        return failure

    def remove(self, name: Path) -> None:
        """Forget a mark."""
        (self.folder / name).unlink(missing_ok=True)

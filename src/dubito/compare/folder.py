"""A comparison's folder: what each method left there, whole or not at all."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import StorageError
from ..storage import exists, write_text
from ..storage.files import json_checksum
from ..storage.schema import Recorded, conform

#: Of the files; those of the one before have no checksum.
FORMAT, UNSIGNED = 4, 3
#: Rows that are no methods of the library and leave no posterior.
BASELINES = ("logistic-regression", "ridge-regression", "poisson-regression", "gradient-boosting")


@dataclass(frozen=True, kw_only=True)
class FitRecord:
    """What became of a method's training on one split.

    Attributes:
        split: its number.
        steps: made.
        best_step: the one whose state was kept; None where the last was.
        ended: by what: "limit" of its steps, "patience" of early stopping, "budget", or "" where nothing was trained.
        chosen: settings that validation rows chose, by name.
        validation_nll: of validation rows; recorded, never used to hide or to replace a result.
        seconds: of its own work, CPU time (on accelerators the wall's).
        shared_seconds: of the MAP fit that it stands on and shares with other methods.
    """

    split: int
    steps: int = 0
    best_step: int | None = None
    ended: str = ""
    chosen: dict[str, Any] = field(default_factory=dict)
    validation_nll: Recorded | None = None
    seconds: float = 0.0
    shared_seconds: float = 0.0


@dataclass(frozen=True)
class MethodRow:
    """One method's result, its mean over splits.

    Attributes:
        method: its name.
        metrics: by name; empty where it failed.
        num_parameters: of its posterior.
        nbytes: of its posterior.
        seconds: of a fit with the MAP fit that it stands on: CPU time, on accelerators the wall's.
        predict_seconds: of the prediction for 1000 rows, likewise.
        failure: why there is no result, else None.
        notes: warnings the fit gave.
        settings: of the method.
        fits: one record per split.
    """

    method: str
    metrics: dict[str, Recorded]
    num_parameters: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    predict_seconds: float = 0.0
    failure: str | None = None
    notes: tuple[str, ...] = ()
    settings: str = ""
    fits: tuple[FitRecord, ...] = ()

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "MethodRow":
        """The row behind what a file holds."""
        fits = tuple(FitRecord(**fit) for fit in content.get("fits", ()))
        return cls(**{**content, "notes": tuple(content["notes"]), "fits": fits})


@dataclass(frozen=True)
class StoredResult:
    """What a method's file holds.

    Attributes:
        row: its result.
        evidence: what the page draws.
        digest: of all that decided the numbers.
    """

    row: MethodRow
    evidence: dict[str, Any]
    digest: str


@dataclass(frozen=True)
class Folder:
    """Where a comparison lies.

    Args:
        path: made when first written to.
    """

    path: Path

    def of_split(self, split: int, first: int) -> "Folder":
        """Where the results of a split lie: those of the first in the folder itself."""
        return self if split == first else Folder(self.path / f"split-{split}")

    def posterior(self, method: str) -> Path:
        """A method's posterior."""
        return self.path / f"{method}.safetensors"

    def work(self, method: str, suffix: str, digest: str = "") -> Path:
        """A method's file while it is being trained; one that settings decide bears their digest."""
        folder = self.path / ".work"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{method}{digest and f'@{digest[:12]}'}.{suffix}"

    def tidy(self, method: str) -> None:
        """Remove what a method needed while it was trained, under whatever settings."""
        for path in (self.path / ".work").glob(f"{method}[@.]*"):
            path.unlink(missing_ok=True)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write JSON under a name; the file appears whole or not at all."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            body = json.loads(json.dumps({"format": FORMAT, **content}))  # as a reader will find it
            signed = {**body, "sha256": json_checksum(body)}
            write_text(self.path / f"{name}.json", json.dumps(signed) + "\n")
        except (OSError, StorageError) as error:
            raise StorageError(f"cannot write into {self.path}: {error}; choose a folder with --out") from error

    def read(self, name: str) -> dict[str, Any] | None:
        """The JSON under a name; None where there is none. A file that was edited is refused."""
        path = self.path / f"{name}.json"
        if not exists(path):
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise StorageError(f"{path} should be JSON, but reading it failed ({error}); remove it") from error
        if not isinstance(content, dict) or content.get("format") not in (FORMAT, UNSIGNED):
            raise StorageError(
                f"{path} is not of format {FORMAT}: another version of dubito wrote it; remove it, or compare anew"
            )
        signature, expected = content.pop("sha256", None), None
        if content["format"] == FORMAT:
            expected = json_checksum(content)
        if signature != expected:
            raise StorageError(
                f"{path} is altered: it has another sha256 than when it was written; remove it, or compare anew"
            )
        return content

    def store(self, result: StoredResult) -> None:
        """Write what a method left."""
        self.write(result.row.method, asdict(result))

    def result(self, method: str, digest: str | None = None) -> StoredResult | None:
        """What a method left; None where it did not, failed, or had other settings than those of `digest`."""
        content = self.read(method)
        if content is None or not (method in BASELINES or self.posterior(method).is_file()):
            return None
        try:
            row = MethodRow.from_json(content["row"])
            result = StoredResult(row, content["evidence"], content["digest"])
            conform(result, StoredResult, "the result")
        except Exception as error:  # a file may hold anything
            path = self.path / f"{method}.json"
            raise StorageError(f"{path} is altered ({error}); remove it") from error
        return result if digest in (None, result.digest) else None

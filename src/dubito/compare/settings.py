"""What decides a comparison's numbers, beside the methods themselves."""

import hashlib
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from ..data.loading import is_table
from ..data.registry import TaskKind
from ..errors import ConfigError, require_count, require_positive
from ..hints import Checked, checked
from ..inference.laplace import last_layer
from ..method import Method
from ..node_factors.laws import NearOne
from ..storage import encode, json_checksum
from ..training import AutoTraining, Training
from .likelihood import LikelihoodName

#: What a comparison trains with where nothing else is asked for.
DEFAULT_TRAINING = Training.auto()
#: The part of a budget for the whole command that training may take; judging and loading have the rest.
TRAINING_SHARE = 0.8
#: Raised when a change of the code changes the numbers, so that old rows no longer count.
REVISION = 6


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """Settings of a comparison.

    Args:
        data: a data set's name, or the path of a table of one's own.
        target: of a table of one's own, the column to predict.
        task: of a table of one's own, what the target is; None detects it.
        likelihood: what fits the target; None chooses by the training targets and the residuals of a pilot.
        splits: which of the data's splits; metrics are means over them.
        rows: train on so many rows at most, drawn by seed; None takes all.
        held_out: classes kept from training, as out-of-distribution rows; None for a fifth of those of named data
            without `ood`, and for none of a table of one's own.
        ood: names or paths of other data sets, as out-of-distribution rows too.
        corrupt: judge under shift as well; None does so where it costs little.
        model: `package.module:factory` of a network of one's own; None takes one that suits the data.
        training: the same for every method: the protocol, where all stand on one MAP fit, or one's own.
        budget: seconds for all methods together, shared equally; a fit that has spent its share stops.
        budget_per_method: CPU seconds for each method instead.
        seed: of everything random.
        num_samples: draws per prediction.
        tune: trials for each method that choose settings of its own on validation rows; None for none.
        overrides: of one method, the names and values that its trials chose.
        point: those of the MAP fit that it stands on.
    """

    data: str
    target: str | None = None
    task: TaskKind | None = None
    likelihood: LikelihoodName | None = None
    splits: tuple[int, ...] = (0,)
    rows: int | None = None
    held_out: int | None = None
    ood: tuple[str, ...] = ()
    corrupt: bool | None = None
    model: str | None = None
    training: Training | AutoTraining = DEFAULT_TRAINING
    budget: float | None = None
    budget_per_method: float | None = None
    seed: int = 0
    num_samples: int = 32
    tune: int | None = None
    overrides: tuple[tuple[str, float | str], ...] = ()
    point: tuple[tuple[str, float | str], ...] = ()

    def __post_init__(self) -> None:
        require_count(num_samples=self.num_samples, tune=1 if self.tune is None else self.tune)
        if self.rows is not None:
            require_count(8, rows=self.rows)
        if self.held_out is not None:
            require_count(0, held_out=self.held_out)
        if not self.splits or len(set(self.splits)) != len(self.splits):
            raise ConfigError(f"splits must be different numbers, at least one, got {self.splits}")
        for name in ("budget", "budget_per_method"):
            if (value := getattr(self, name)) is not None:
                require_positive(**{name: value})
        if self.budget is not None and self.budget_per_method is not None:
            raise ConfigError("give budget or budget_per_method, got both")

    @checked
    def fit_seconds(self, num_methods: int, jobs: int = 1) -> float | None:
        """CPU seconds that one fit or trial of a method on one split may take; None for no limit.

        Args:
            num_methods: among which a budget is shared.
            jobs: fits at a time.
        """
        fits = len(self.splits) * (1 + (self.tune or 0))
        if self.budget is not None:
            return TRAINING_SHARE * self.budget * jobs / (max(1, num_methods) * fits)
        return None if self.budget_per_method is None else self.budget_per_method / fits

    def applied(self, method: Method) -> tuple[Method, Training | AutoTraining]:
        """A method and its training with the values that trials chose, each a setting of the one or of the other."""
        values: dict[str, Any] = dict(self.overrides)
        if "subset" in values:
            values["subset"] = {"all": None, "last_layer": last_layer}[values["subset"]]
        if "initial" in values:
            values["initial"] = NearOne(std=values["initial"])
        of_method = {item.name: values.pop(item.name) for item in fields(method) if item.name in values}
        return replace(method, **of_method), replace(self.training, **values)

    def of_split(self, split: int, seconds: float | None) -> "Settings":
        """The settings of the fits on one split, with the CPU seconds that each may take."""
        return replace(self, splits=(split,), budget=None, budget_per_method=seconds)

    def digest(self, method: Method | str) -> str:
        """A checksum of all that decides a method's numbers, the contents of the user's own tables among them."""
        settings = encode(replace(self, tune=None))  # trials decide by what they chose
        return json_checksum([REVISION, settings, encode(method), dict(self.tables())])

    def tables(self) -> tuple[tuple[str, str | None], ...]:
        """The user's own tables with the checksums of their contents, which may change under the same name."""
        return tuple((path, file_sha256(path)) for path in (self.data, *self.ood) if is_table(path))


def file_sha256(path: str) -> str | None:
    """The checksum of a file's content; None where there is none."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def seconds_of(text: str) -> float:
    """The seconds behind a budget such as `90s`, `10m` or `1.5h`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip().lower())
    if match is None or not float(match[1]) > 0:
        raise ConfigError(f"a budget must be a time such as 90s, 10m or 1.5h, got {text!r}")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]

"""How a prediction is made: the keywords that `predict` and `evaluate` of every posterior share."""

from dataclasses import dataclass

from ..errors import ConfigError, require_count
from ..hints import Checked
from ..precision import Precision

#: Forms of prediction that only some posteriors have, by their keywords: those with a method `<form>_prediction`.
FORMS = ("linearised", "marginal", "per_example")


@dataclass(frozen=True)
class PredictionOptions(Checked):
    """The options of a prediction, checked.

    Attributes:
        num_samples: draws in all.
        seed: of the draws.
        max_rows: rows that go through the network at once.
        linearised: in closed form around the mean of the weights; None does as the method says.
        marginal: draw the outputs of layers anew for each row.
        per_example: draw factors anew for each row.
        precision: of passes through the network.
        moments: keep `function_mean`, which mixtures of predictions need.
    """

    num_samples: int
    seed: int
    max_rows: int
    linearised: bool | None = None
    marginal: bool = False
    per_example: bool = False
    precision: Precision = "full"
    moments: bool = False

    def __post_init__(self) -> None:
        require_count(num_samples=self.num_samples, max_rows=self.max_rows)
        if not (self.linearised is None and self.marginal is False and self.per_example is False):
            self._check_forms()

    def _check_forms(self) -> None:
        asked = [form for form in FORMS if getattr(self, form)]
        if len(asked) > 1:
            raise ConfigError(f"a prediction has one form, got {' and '.join(asked)}; choose one")

    @property
    def form(self) -> str | None:
        """The form that is asked for; None leaves it to the posterior, or to draws where `linearised` is False."""
        for form in FORMS:
            if getattr(self, form):
                return form
        return None

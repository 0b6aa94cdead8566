"""Estimators of scikit-learn over every method: `BayesianClassifier` and `BayesianRegressor`."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from .. import seeds
from ..data.assemble import column_statistics
from ..data.columns import described, differences, encoded, filled, medians
from ..errors import ConfigError, DataError, require_count, require_fraction, unknown_name, warn
from ..likelihoods import Categorical, Gaussian, Likelihood
from ..method import Method
from ..models import mlp
from ..posterior import Posterior
from ..prediction import CategoricalPrediction, Prediction, RealPrediction
from ..protocol.run import LEAST_ROWS
from ..registry import methods
from ..training import AutoTraining, Training

try:
    import pandas
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import Tags, check_array, check_consistent_length, check_random_state, column_or_1d
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ConfigError(f"{error}; the estimators need an extra: pip install 'dubito[sklearn]'") from error

#: Tables of fewer rows are trained by a shorter run.
SMALL = 1000


class BayesianEstimator(BaseEstimator):
    """A multilayer perceptron with a posterior over its weights, trained by the protocol of `dubito compare`.

    X is an array or a frame of pandas, whose words become categories. Values may be missing. Columns are standardised,
    all numbers are float64.

    Args:
        method: a name of `dubito.methods()`, or a method such as `dubito.Laplace(structure=dubito.INF(rank=20))`.
        hidden_layer_sizes: widths of the hidden layers; none makes a linear model.
        activation: of the hidden layers: "relu", "gelu", "silu", "tanh" or "leaky_tanh".
        training: "auto", `Training.auto(...)` for the protocol with other settings, or a `Training(...)`.
        validation_fraction: of the rows, kept from training to stop it and to fit noise or temperature.
        num_samples: draws per prediction, where the method's are not in closed form.
        device: of PyTorch, such as "cuda"; None takes PyTorch's default.
        random_state: of everything random; None takes numpy's global state.

    Attributes:
        posterior_: what the method returned, with `save`, `summary` and `evaluate`.
        columns_: how each column of X is read.
        n_features_in_: columns of X.
        feature_names_in_: their names, where all are words.
    """

    posterior_: Posterior
    _uncertainties: ClassVar[dict[str, str]]

    def __init__(
        self,
        method: str | Method = "laplace-kfac",
        *,
        hidden_layer_sizes: Sequence[int] = (64, 64),
        activation: str = "relu",
        training: Any = "auto",
        validation_fraction: float = 0.2,
        num_samples: int = 32,
        device: str | None = None,
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        self.method = method
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.training = training
        self.validation_fraction = validation_fraction
        self.num_samples = num_samples
        self.device = device
        self.random_state = random_state

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def prediction(self, X: Any) -> Prediction:
        """The whole prediction: probabilities or a mixture of Normals, and the parts of its uncertainty.

        Args:
            X: rows like those of `fit`.
        """
        inputs = self._inputs(X)
        return self.posterior_.predict(inputs, self.num_samples, seed=self.seed_)

    def predict_uncertainty(self, X: Any, kind: str = "epistemic") -> np.ndarray:
        """A number per row: of classes an entropy in nats, of reals a standard deviation in the target's units.

        Args:
            X: rows like those of `fit`.
            kind: "aleatoric" for the noise, "epistemic" for what more rows would remove, "total" for both together.
        """
        if kind not in self._uncertainties:
            raise unknown_name("kind", kind, self._uncertainties)
        return _array(getattr(self.prediction(X), self._uncertainties[kind]))

    def _fitted(self, frame: Any, targets: np.ndarray, num_outputs: int, likelihood: Likelihood) -> Self:
        """The estimator, fitted to targets that were checked."""
        require_count(num_samples=self.num_samples)
        require_fraction(zero=False, validation_fraction=self.validation_fraction)
        method = methods()[self.method] if isinstance(self.method, str) else self.method
        if not isinstance(method, Method):
            raise ConfigError(f"method must be a name such as 'laplace-inf' or a method, got {method!r}")
        check_consistent_length(frame, targets)
        if len(frame) < 2:
            raise DataError(f"X must hold at least 2 rows, got n_samples={len(frame)}")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        train, held = self._parted(targets, seed)
        columns, _ = described(frame, "X", constant=True)
        if ignored := [column.name for column in columns if column.kind == "ignored"]:
            told = f"columns of X that are empty, or hold a name or text, are left out: {', '.join(ignored)}"
            warn(told)
        values = encoded(frame, columns, "X")
        self.columns_, self.seed_, self.fill_ = columns, seed, medians(values[train])
        self.shift_, self.scale_ = column_statistics(filled(values[train], self.fill_))
        inputs = self._scaled(values)
        network = mlp(
            inputs.shape[1], self.hidden_layer_sizes, num_classes=num_outputs, activation=self.activation, seed=seed
        )
        training = self.training
        if isinstance(training, str) and training == "auto":
            training = training_for(len(train), classes=isinstance(likelihood, Categorical))
        self.posterior_ = method.fit(
            network.to(self.device or torch.get_default_device(), torch.float64),
            (inputs[train], targets[train]),
            likelihood,
            training=training,  # pyright: ignore[reportArgumentType]
            validation=(inputs[held], targets[held]),
            seed=seed,
            progress=False,
        )
        return self

    def _parted(self, targets: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows to train on, at least one of every class, and rows that steer; of few rows all do both."""
        rows = len(targets)
        order = np.random.default_rng(seeds.derived(seed, "validation rows")).permutation(rows)
        spare = np.ones(rows, dtype=bool)
        if targets.dtype.kind == "i":
            spare[np.unique(targets[order], return_index=True)[1]] = False
        if rows < LEAST_ROWS or spare.sum() < 2:
            return np.arange(rows), np.arange(rows)
        held = order[spare][: max(2, round(self.validation_fraction * rows))]
        return np.setdiff1d(order, held), np.sort(held)

    def _inputs(self, X: Any) -> np.ndarray:
        """New rows as the network reads them."""
        check_is_fitted(self)
        frame = self._frame(X, [column.name for column in self.columns_])
        if told := differences(frame, self.columns_, "X"):
            warn(f"X differs from what was fitted: {'; '.join(told)}")
        return self._scaled(encoded(frame, self.columns_, "X"))

    def _frame(self, X: Any, names: Sequence[str] | None = None, y: Any = "no_validation") -> Any:
        """X as a frame with words for headings, after the checks of scikit-learn; without names that of a fit."""
        if not isinstance(X, pandas.DataFrame):
            rules: dict[str, Any] = {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
            X = check_array(X, **rules, estimator=self, input_name="X")
        frame: Any = pandas.DataFrame(X)
        new = names is None
        if names is None:
            names = [f"x{name}" if isinstance(name, int) else str(name) for name in frame.columns]
            if len(set(names)) < len(names):
                raise DataError("columns of X must have different names; rename those that occur twice")
        known: Any = X
        validate_data(self, known, y, reset=new, skip_check_array=True)
        return frame.set_axis(names, axis=1)

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        return (filled(values, self.fill_) - self.shift_) / self.scale_


class BayesianRegressor(RegressorMixin, BayesianEstimator):
    """Regression with one or several real targets: `y` of shape [N] or [N, targets]."""

    _uncertainties: ClassVar = {
        "total": "std", "aleatoric": "aleatoric_std", "epistemic": "epistemic_std",
    }  # fmt: skip

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to rows and their targets.

        Args:
            X: an array or frame, [N, columns].
            y: real numbers.
        """
        frame = self._frame(X, y=y)
        kind: Any = np.float64
        values = check_array(y, ensure_2d=False, dtype=kind, estimator=self, input_name="y")
        values = values.reshape(len(values), -1)
        return self._fitted(frame, values, values.shape[1], Gaussian(standardise=True))

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean, and with `return_std` the standard deviation of a new target, noise included, beside it."""
        prediction = self._real(X)
        return (_array(prediction.mean), _array(prediction.std)) if return_std else _array(prediction.mean)

    def predict_interval(self, X: Any, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of the central interval that holds a new target with probability `level`."""
        low, high = self._real(X).interval(level)
        return _array(low), _array(high)

    def predict_quantiles(self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles of new targets along the last axis, [N, Q] or [N, targets, Q]."""
        levels = torch.tensor(quantiles, dtype=torch.float64)
        return np.stack([_array(values) for values in self._real(X).quantile(levels)], axis=-1)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: int | np.random.RandomState | None = 0) -> np.ndarray:
        """Targets of drawn functions, each with its noise, along the last axis, [N, S] or [N, targets, S].

        Args:
            X: rows like those of `fit`.
            n_samples: functions to draw; all rows of a sample are of one function.
            random_state: of the draws.
        """
        inputs = self._inputs(X)
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        posterior = self.posterior_
        outputs = posterior.sample_outputs(inputs, n_samples, seed=seed)
        drawn = [
            posterior.likelihood.sample(values, seeds.generator(seed, "noise", index, device=values.device), index)
            for index, values in enumerate(outputs)
        ]
        return np.stack([_array(values) for values in drawn], axis=-1)

    def _real(self, X: Any) -> RealPrediction:
        prediction = self.prediction(X)
        assert isinstance(prediction, RealPrediction)
        return prediction


class BayesianClassifier(ClassifierMixin, BayesianEstimator):
    """Classification into two or more classes, given as numbers or words."""

    _uncertainties: ClassVar = {kind: kind for kind in ("total", "aleatoric", "epistemic")}

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to rows and their classes.

        Args:
            X: an array or frame, [N, columns].
            y: classes, [N].
        """
        frame = self._frame(X, y=y)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"y must hold at least two classes, got one class: {self.classes_[0]}")
        return self._fitted(frame, numbers, len(self.classes_), Categorical())

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of each row."""
        likeliest = self.predict_proba(X).argmax(1)
        return self.classes_[likeliest]

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class in the order of `classes_`, averaged over the posterior."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """The logarithms of the probabilities."""
        prediction = self.prediction(X)
        assert isinstance(prediction, CategoricalPrediction)
        return _array(prediction.log_probs)


def training_for(rows: int, *, classes: bool = False) -> AutoTraining:
    """The protocol for a table of so many rows.

    A small one begins with fewer steps at a higher rate, and has one prior, which its few validation rows could not
    choose: on 30 to 250 rows of diabetes, breast cancer and Friedman's function likelihoods were like those after 2,000
    steps. Yacht and energy, whose noise is small, ask for more.
    """
    if rows >= SMALL:
        return Training.auto()
    steps = max(60, rows)
    longer = None if classes else (4 * steps, 16 * steps)
    return Training.auto(iterations=steps, longer=longer, lr=2e-2, priors=(0.5,))


def _array(values: Tensor) -> np.ndarray:
    """Values of rows as an array; one output has no axis of its own."""
    array = values.detach().cpu().numpy()
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array

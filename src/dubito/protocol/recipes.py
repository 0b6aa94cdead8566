"""How the protocol trains each method: from which start, for how long, at which rates."""

from dataclasses import MISSING, dataclass, fields, replace
from functools import singledispatch
from typing import Any

from ..hints import Checked
from ..inference.bali import BALI
from ..inference.batch_ensemble import BatchEnsemble
from ..inference.hmc import HMC
from ..inference.implicit import Implicit
from ..inference.k_tied import KTied
from ..inference.laplace import Laplace
from ..inference.map import MAP
from ..inference.mc_dropout import MCDropout
from ..inference.mean_field import MeanField
from ..inference.natural_gradient import VOGN, NaturalGradient, NoisyAdam, NoisyKFAC, Vadam
from ..inference.pbp import PBP
from ..inference.rank1 import Rank1
from ..inference.swag import SWA, SWAG
from ..method import Method
from ..node_factors.laws import NearOne
from ..training import AutoTraining, Training


@dataclass(frozen=True, kw_only=True)
class Pilot(Checked):
    """What the MAP fit tells the other methods.

    Attributes:
        prior_std: of the Normal prior that its pilots chose; None is the flat prior.
        best_step: the steps after which its validation loss was least.
        limit: the most steps that it might have made; None for the first of the protocol.
        rows: the number of training rows.
        real: whether targets are real.
    """

    prior_std: float | None
    best_step: int
    rows: int
    real: bool
    limit: int | None = None

    @property
    def weight_decay(self) -> float:
        """The prior as weight decay, 1 / (σ² N), for methods whose prior is on other things."""
        return 0.0 if self.prior_std is None else 1 / (self.prior_std**2 * self.rows)


@dataclass(frozen=True, kw_only=True)
class Recipe(Checked):
    """How one method is trained.

    Attributes:
        method: with the settings that the protocol gives it; what the user set stays.
        training: of its run; None where it trains nothing.
        warm: whether it starts from the MAP fit's weights and noise, in place of the user's.
    """

    method: Method
    training: Training | None
    warm: bool


@singledispatch
def recipe(method: Method, pilot: Pilot, auto: AutoTraining) -> Recipe:
    """The recipe of a method: from scratch, unless one is registered for its class (`recipe.register`).

    Args:
        method: the user's.
        pilot: what the MAP fit tells.
        auto: the protocol's settings.
    """
    method = _with_defaults(method, prior_std=pilot.prior_std)
    decay = 0.0 if hasattr(method, "prior_std") else pilot.weight_decay
    return Recipe(method=method, training=auto.training(_steps(pilot, auto), weight_decay=decay), warm=False)


@recipe.register(Laplace)
@recipe.register(HMC)
@recipe.register(PBP)
def _standing(method: Method, pilot: Pilot, auto: AutoTraining) -> Recipe:
    return Recipe(method=method, training=None, warm=True)


@recipe.register(MAP)
def _point(method: MAP, pilot: Pilot, auto: AutoTraining) -> Recipe:
    training = auto.training(_steps(pilot, auto))
    return Recipe(method=_with_defaults(method, prior_std=pilot.prior_std), training=training, warm=False)


@recipe.register(SWA)
@recipe.register(SWAG)
def _averaged(method: SWA | SWAG, pilot: Pilot, auto: AutoTraining) -> Recipe:
    # As long again as the MAP fit needed, at a constant rate: weights are gathered over the second half.
    steps = max(2 * auto.every, round(1.5 * pilot.best_step))
    training = auto.training(steps, falling=False, stopping=False)
    return Recipe(method=_with_defaults(method, prior_std=pilot.prior_std), training=training, warm=False)


@recipe.register(MCDropout)
def _dropout(method: MCDropout, pilot: Pilot, auto: AutoTraining) -> Recipe:
    method = _with_defaults(method, rate=0.05 if pilot.real else None)
    return recipe.dispatch(Method)(method, pilot, auto)


@recipe.register(MeanField)
def _mean_field(method: MeanField, pilot: Pilot, auto: AutoTraining) -> Recipe:
    return _cold(_with_defaults(method, prior_std=pilot.prior_std), pilot, auto, variational_lr=1e-2, kl=0.1)


@recipe.register(KTied)
def _k_tied(method: KTied, pilot: Pilot, auto: AutoTraining) -> Recipe:
    return _cold(_with_defaults(method, prior_std=pilot.prior_std), pilot, auto, variational_lr=1e-2, kl=0.03)


@recipe.register(NoisyAdam)
@recipe.register(Vadam)
@recipe.register(VOGN)
@recipe.register(NoisyKFAC)
def _natural(method: NaturalGradient, pilot: Pilot, auto: AutoTraining) -> Recipe:
    # Moving averages over 100 steps, of which there are not many more.
    averages = {"betas": (0.9, 0.01 if isinstance(method, VOGN) else 0.99)}
    start = {"prior_std": pilot.prior_std, "initial_std": 0.01, "kl_weight": 0.1}
    rate = method.recommended_lr if isinstance(method, Vadam) else 1e-2
    return _cold(_with_defaults(method, **start, **averages), pilot, auto, lr=rate)


@recipe.register(Rank1)
@recipe.register(BatchEnsemble)
def _factors(method: Rank1 | BatchEnsemble, pilot: Pilot, auto: AutoTraining) -> Recipe:
    if not pilot.real:
        method = _with_defaults(method, initial=NearOne(std=0.5))
        return recipe.dispatch(Method)(method, pilot, auto)
    return _real_factors(_with_defaults(method, initial=NearOne(std=0.1), factor_rate=1.0), pilot, auto)


@recipe.register(Implicit)
def _implicit(method: Implicit, pilot: Pilot, auto: AutoTraining) -> Recipe:
    if not pilot.real:
        training = auto.training(_steps(pilot, auto), weight_decay=pilot.weight_decay)
        return Recipe(method=method, training=training, warm=False)
    return _real_factors(_with_defaults(method, mean_std=0.1), pilot, auto)


@recipe.register(BALI)
def _bali(method: BALI, pilot: Pilot, auto: AutoTraining) -> Recipe:
    if not pilot.real:  # the paper's for a table of classes (its Table 5, Spam)
        method = _with_defaults(method, step_size=0.1, update_rate=0.1, prior_scale=10.0)
    batch_size = max(auto.batch_size, 256) if pilot.real else auto.batch_size
    return _cold(method, pilot, auto, falling=False, batch_size=batch_size)


def _real_factors(method: Method, pilot: Pilot, auto: AutoTraining) -> Recipe:
    """Factors of real targets start from the MAP fit, unless that took longer than the first limit.

    Then noise is small, and factors that stray from 1 have left the fit farther than a short run can mend.
    """
    steps, decay = _steps(pilot, auto), pilot.weight_decay
    if steps > auto.steps(pilot.rows):
        return Recipe(method=method, training=auto.training(steps, weight_decay=decay), warm=False)
    return _warm(method, pilot, auto, weight_decay=decay)


def _steps(pilot: Pilot, auto: AutoTraining) -> int:
    """The most steps from scratch: those of the MAP fit."""
    return pilot.limit or auto.steps(pilot.rows)


def _warm(method: Method, pilot: Pilot, auto: AutoTraining, **changes: Any) -> Recipe:
    """A start from the MAP fit: half as many steps at a quarter of the rate, and the start itself may be the best."""
    steps = max(1, auto.steps(pilot.rows) // 2)
    training = auto.training(steps, **{"lr": auto.lr / 4, "start": True, **changes})
    return Recipe(method=method, training=training, warm=True)


def _cold(method: Method, pilot: Pilot, auto: AutoTraining, **changes: Any) -> Recipe:
    """A start from the MAP fit, and a run to its end, where an earlier state is not better beyond chance.

    Plain early stopping would take the start, before deviations moved. The divergence counts for less than in the
    evidence bound, where a method weighs one: of networks as wide as these, warm posteriors predict worse. The scale
    that validation rows choose afterwards may widen them again.
    """
    return _warm(method, pilot, auto, last=True, **changes)


def _with_defaults(method: Any, **values: Any) -> Any:
    """The method with other defaults: settings that its user changed stay, and so do those whose value here is None.

    A method with a prior of its user's has no `prior_std` beside it.
    """
    if getattr(method, "prior", None) is not None:
        values = {name: value for name, value in values.items() if name != "prior_std"}
    defaults = {item.name: item.default for item in fields(method) if item.default is not MISSING}
    untouched = {
        name: value
        for name, value in values.items()
        if value is not None and name in defaults and getattr(method, name) == defaults[name]
    }
    return replace(method, **untouched)

"""What the methods with independent Normals over weights share: how they start, alone or beside another."""

from abc import abstractmethod
from typing import ClassVar, Self

from torch import Tensor

from ..fitting import Start
from ..method import TrainedMethod
from ..networks import Subset
from ..priors import Around, PriorStd
from .estimators import Estimator
from .objective import NormalObjective
from .posterior import NormalPosterior


class NormalMethod(TrainedMethod):
    """A method whose weights are Normal, such as `MeanField` and `KTied`."""

    prior_std: PriorStd
    max_std: float | None
    estimator: Estimator
    subset: Subset
    prior: Around | None

    #: Multiplies the learning rate of tied factors.
    factor_rate: ClassVar[float] = 1.0

    @abstractmethod
    def started(self, start: Start) -> tuple[Self, dict[str, dict[str, Tensor]]]:
        """The method, which from now on knows its parameters by name, and the scales that these start with.

        Args:
            start: network and seed.
        """

    def objective(self, start: Start) -> NormalObjective:
        method, tensors = self.started(start)
        return NormalObjective(
            NormalPosterior(start.network, start.likelihood, method=method, tensors=tensors),
            estimator=self.estimator,
            factor_rate=self.factor_rate,
            num_data=start.num_data,
            modes=start.modes,
        )

"""Vadam, Noisy K-FAC and mean field on the UCI tables, beside BALI on the same splits.

The paper quotes these columns (VADAM, NNG-MVG, BBB) from other papers, which tuned learning rate, prior or noise by
searches of their own, and states nothing but the network. Here all three have the same data, network, standard Normal
prior and learned noise, and one setting for all tables; rates fall as BALI's do, by 5 after 60 % and 80 % of the run.

A step of so small a network costs its overhead, not its arithmetic: the splits of one table are trained side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from dubito import Gaussian, seeds
from dubito.data import Part, Scaling
from dubito.errors import require_count, require_positive
from dubito.layers import Context, kind
from dubito.layers.convolution import Convolution
from dubito.likelihoods import GaussianLikelihood
from dubito.method import Method
from dubito.training import Step, Training

from ...runner import provenance
from ...runner.experiment import Outcome
from ...settings import explicit
from .dropout import standardising
from .layerwise import scored


@dataclass(frozen=True, kw_only=True)
class BaselineRun:
    """Settings of one method on one table.

    Args:
        method: its own settings.
        lr: learning rate of the weights at the start.
        noise_lr: of the noise, and of mean field's standard deviations.
        iterations: steps.
        batch_size: rows per step.
        hidden: units of the hidden layer.
        num_samples: draws of a prediction.
    """

    method: Method
    lr: float
    iterations: int
    noise_lr: float = 0.01
    batch_size: int = 128
    hidden: int = 50
    num_samples: int = 256

    def __post_init__(self) -> None:
        require_positive(lr=self.lr, noise_lr=self.noise_lr)
        require_count(iterations=self.iterations, batch_size=self.batch_size)
        require_count(hidden=self.hidden, num_samples=self.num_samples)


@dataclass(frozen=True)
class Grouped(Convolution):
    """A convolution of width 1 in groups as a batched product, three times as fast as PyTorch's convolution."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        rows = x.reshape(len(x), self.groups, -1).transpose(0, 1)  # [R, B, n]
        matrices = weight.reshape(self.groups, -1, rows.shape[2])
        outputs = torch.baddbmm(bias.reshape(self.groups, 1, -1), rows, matrices.mT)
        return outputs.transpose(0, 1).reshape(len(x), -1, 1)


def grouped(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    """R dense layers side by side, on inputs [B, R · n, 1]."""
    if has_torch_function((x, weight, bias)):
        return handle_torch_function(grouped, (x, weight, bias), x, weight, bias, groups)
    return _form(weight, groups).apply(x, weight, bias)


@kind(grouped)
def read_grouped(at: Context, x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    """Every method of the library knows it as a convolution, each group with factors of its own."""
    return at.use(_form(weight, groups), x, weight, bias)


def _form(weight: Tensor, groups: int) -> Grouped:
    return Grouped(len(weight) // groups, weight.shape[1], (1,), (1,), ((0, 0),), (1,), groups)


class Beside(nn.Conv1d):
    """R linear layers side by side: a convolution of width 1 in R groups, as a batched product.

    Args:
        count: R.
        inputs: of each layer.
        outputs: of each layer.
    """

    def __init__(self, count: int, inputs: int, outputs: int) -> None:
        super().__init__(count * inputs, count * outputs, 1, groups=count)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        return grouped(input, weight, bias, self.groups)


class SideBySide(nn.Module):
    """Networks with one hidden layer; output r is network r's, from row r of the inputs [B, R, n].

    They share nothing, so the gradient of a loss that sums over outputs trains each as if alone.

    Args:
        features: columns of a table.
        hidden: units of the hidden layer.
        seeds_of_parts: of the weights of each, whatever stands beside it.
    """

    def __init__(self, features: int, hidden: int, seeds_of_parts: Sequence[int]) -> None:
        super().__init__()
        count = len(seeds_of_parts)
        with seeds.forked(0, "replaced below"):
            self.first, self.second = Beside(count, features, hidden), Beside(count, hidden, 1)
        for place, seed in enumerate(seeds_of_parts):
            with seeds.forked(seed, "initial weights"), torch.no_grad():
                for own, linear in ((self.first, nn.Linear(features, hidden)), (self.second, nn.Linear(hidden, 1))):
                    own.weight.unflatten(0, (count, -1))[place].copy_(linear.weight[..., None])
                    assert own.bias is not None
                    own.bias.unflatten(0, (count, -1))[place].copy_(linear.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs.flatten(1)[..., None]).relu())[..., 0]


@dataclass(frozen=True)
class StandardisedTables:
    """Scalings of inputs and targets by each table's training rows."""

    inputs_by: tuple[Scaling, ...]
    targets_by: tuple[Scaling, ...]

    @classmethod
    def of(cls, trains: Sequence[Part]) -> "StandardisedTables":
        """By these training rows."""
        return cls(
            tuple(standardising(part.inputs) for part in trains), tuple(standardising(part.targets) for part in trains)
        )

    def inputs(self, parts: Sequence[Part]) -> Tensor:
        """[B, R, n]."""
        return torch.stack([by.apply(part.inputs) for by, part in zip(self.inputs_by, parts, strict=True)], 1).float()

    def targets(self, parts: Sequence[Part]) -> Tensor:
        """[B, R]."""
        return torch.cat([by.apply(part.targets) for by, part in zip(self.targets_by, parts, strict=True)], 1).float()

    def judged(self, tests: Sequence[Part], means: Tensor, stds: Tensor) -> list[Outcome]:
        """Results in original units of draws [S, B, R] with noise [R]."""
        outcomes = []
        for place, (part, scaling) in enumerate(zip(tests, self.targets_by, strict=True)):
            own = scaling.undo(means[..., place, None].double())
            outcomes.append(scored(part, own, stds[place].double() * scaling.scale, {}))
        return outcomes


def run_baseline(
    trains: Sequence[Part],
    tests: Sequence[Part],
    settings: BaselineRun,
    *,
    seeds_of_parts: Sequence[int],
    steps: int | None = None,
) -> list[Outcome]:
    """Train on every table and judge its test rows.

    Args:
        trains: training rows in original units; as many in every table.
        tests: test rows likewise.
        settings: of the run.
        seeds_of_parts: one per table; order of rows and noise are the first's.
        steps: ends training after so many steps, and prediction after as many draws.
    """
    tables = StandardisedTables.of(trains)
    posterior = provenance.fit(
        settings.method,
        SideBySide(trains[0].inputs.shape[1], settings.hidden, seeds_of_parts),
        (tables.inputs(trains), tables.targets(trains)),
        explicit(Gaussian),
        training=explicit(
            Training,
            iterations=steps or settings.iterations,
            batch_size=settings.batch_size,
            lr=settings.lr,
            variational_lr=settings.noise_lr,
            schedule=explicit(Step),
        ),
        seed=seeds_of_parts[0],
        progress=False,
    )
    likelihood = posterior.likelihood
    assert isinstance(likelihood, GaussianLikelihood)
    means = posterior.sample_outputs(tables.inputs(tests), steps or settings.num_samples)
    return tables.judged(tests, means, likelihood.std().detach())

"""What natural-gradient optimisers share: means that are moved, and draws around them to take gradients at."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import seeds
from ..errors import ConfigError, require_flag, require_fraction, require_positive
from ..hints import Checked, checked
from .watch import Watch


class NoisyOptimizer(Checked, Optimizer, ABC):
    """An optimiser whose parameters are the means of a Gaussian posterior.

    Gradients are taken inside `with optimizer.sampled():`, where the parameters hold a draw; the loss is the
    negative log-likelihood, a mean over rows, without a prior's penalty, which the optimiser adds itself. Several
    passes before a step add up, each inside a `sampled()` of its own: weigh each loss by its share of the step's rows.
    Gradients must not be scaled, as `torch.amp.GradScaler` does: squares of rows would be of the scaled ones.

    The Fisher information is a mean of squares over rows. Where the mean gradient ḡ of B rows alone is known, B ḡ²
    stands in, whose mean is E[g²] + (B − 1) E[g]²: the same where the full gradient E[g] vanishes.

    Args:
        params: parameters, or groups of them.
        settings: of a group: `num_data`, which is N, `seed`, `lr`, `prior_std`, `kl_weight`, `initial_std`, ….
    """

    #: Whether the rule needs what each row says.
    watches = False
    #: A learning rate to start from, found at 64 rows a step.
    recommended_lr: ClassVar[float]

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        require_positive(num_data=settings["num_data"])
        seeds.derived(settings["seed"])
        try:
            super().__init__(params, {**settings, "draws": 0, "passes": 0, "rows": 0})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"params must be parameters, or groups of them, got {error}") from error
        for group in self.param_groups:
            self.check(group)
        self._begin()

    def _begin(self) -> None:
        """What no state holds."""
        self.watch = Watch(p for group in self.param_groups for p in group["params"])
        self._open = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Learn further parameters, with settings of their own where the group has some."""
        if not hasattr(self, "watch"):  # the first groups, which are checked together
            return super().add_param_group(param_group)
        known = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            self.check(self.param_groups[-1])
        except (TypeError, ValueError) as error:  # of torch's or of `check`
            del self.param_groups[known:]
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"param_group must hold parameters under 'params', got {error}") from error
        return self._begin()

    @classmethod
    def check(cls, settings: dict[str, Any]) -> None:
        """Refuse settings out of range."""
        positive = ("lr", "prior_std", "initial_std", "kl_weight")
        require_positive(**{name: settings[name] for name in positive if name in settings})
        require_positive(zero=True, extrinsic_damping=settings.get("extrinsic_damping", 0.0))
        require_flag(**{name: settings[name] for name in ("count_rows", "correct_start") if name in settings})
        if "betas" in settings:
            require_fraction(beta1=settings["betas"][0], beta2=settings["betas"][1])

    # -- draws ---------------------------------------------------------------------------------------------------

    @checked
    @contextmanager
    def sampled(self, generator: torch.Generator | None = None, *, watched: bool = True) -> Iterator[None]:
        """While open the parameters hold a draw from the posterior; afterwards the means, whatever happened.

        Args:
            generator: the source of noise; None takes the optimiser's own stream.
            watched: notice what layers see, where the rule needs it; False where the passes inside do so themselves,
                by `watch.context`.
        """
        if self._open:
            raise ConfigError("sampled() is open already: close it before another draw")
        first, held = self.param_groups[0], self.parameters()
        means = [p.detach().clone() for _, p in held]
        if generator is None:
            generator = seeds.generator(first["seed"], "draw", first["draws"], device=held[0][1].device)
        first["draws"] += 1
        first["passes"] += 1
        self._open = True
        try:
            with torch.no_grad():
                self.draw_all(generator)
                for _, p in held:
                    state = self.state[p]
                    state["drawn"] = state["drawn"].add_(p) if "drawn" in state else p.detach().clone()
            with self.watch.open() if self.watches and watched else nullcontext():
                yield
            if self.watches:
                self.look()
                first["rows"] += self.watch.rows
        finally:
            self.watch.clear()
            self._open = False
            with torch.no_grad():
                for (_, p), mean in zip(held, means, strict=True):
                    p.copy_(mean)

    def parameters(self) -> list[tuple[dict[str, Any], Tensor]]:
        """All parameters that are learned, with the settings of their groups."""
        return [(group, p) for group in self.param_groups for p in group["params"] if p.requires_grad]

    def draw_all(self, generator: torch.Generator) -> None:
        """Put a draw into every parameter."""
        for group, p in self.parameters():
            p.add_(self.noise(p, group, generator))

    def noise(self, p: Tensor, group: dict[str, Any], generator: torch.Generator) -> Tensor:
        """A parameter's draw less its mean."""
        unit = torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device)
        return unit * self.std(p, group)

    def look(self) -> None:
        """Take in what the passes inside `sampled` showed of each row."""

    def std(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The posterior's standard deviations of one parameter."""
        return self.precision(p, group).rsqrt()

    def precision(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The posterior's precisions of one parameter: w ~ N(μ, λ/N diag(f + γ_in)⁻¹)   [Alg. 2 and 3, line 5]."""
        return (self.fisher(p, group) + damping(group)) * (group["num_data"] / group["kl_weight"])

    # -- steps ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None, *, rows: float | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move the means by the gradients of all passes since the last step.

        Args:
            closure: computes the loss and its gradients, and is called with a draw in the parameters.
            rows: B, of all passes and processes, or the sum of their weights; None takes those that layers were seen
                to read, where the rule watches them.
        """
        if rows is not None:
            require_positive(rows=rows)
        loss, first = None, self.param_groups[0]
        if closure is not None:
            with torch.enable_grad(), self.sampled():
                loss = closure()
        told = rows or first["rows"]
        moved = [(group, p) for group, p in self.moving() if p.grad is not None]
        unseen = [group for group, p in moved if not any(key in self.state[p] for key in self.sums)]
        if not told and any(counted(group) for group in unseen):
            raise ConfigError(
                f"{type(self).__name__} multiplies the square of a batch's mean gradient by its rows, but the number "
                "of rows is not known: call step(rows=len(x)), with the rows of all passes and processes of the step"
            )
        for state, p in ((self.state[p], p) for _, p in self.parameters()):
            state["drawn"] = state["drawn"] / first["passes"] if "drawn" in state else p.clone()
        for group, p in moved:
            assert p.grad is not None
            self.move(p, -p.grad, group, told if counted(group) else 1)
        for _, p in self.parameters():
            del self.state[p]["drawn"]
        first["passes"] = first["rows"] = 0
        self.advance()
        return loss

    def moving(self) -> list[tuple[dict[str, Any], Tensor]]:
        """The parameters that are drawn and moved by themselves."""
        return self.parameters()

    @abstractmethod
    def move(self, p: Tensor, slope: Tensor, group: dict[str, Any], rows: float) -> None:
        """Move one mean; the draw, or the mean of several, is in its state.

        Args:
            p: the parameter, which holds the mean.
            slope: the gradient of the mean log-likelihood at the draw.
            group: the settings.
            rows: B, or 1 where they are not counted.
        """

    def advance(self) -> None:
        """What changes once per step."""

    def fisher(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """f, which starts where the posterior has the standard deviation `initial_std`."""
        state = self.state[p]
        if "fisher" not in state:
            state["fisher"] = torch.full_like(p, max(0.0, self.initial_fisher(group)))
        return state["fisher"]

    def initial_fisher(self, group: dict[str, Any]) -> float:
        """f_0, below 0 where `initial_std` is above the prior's."""
        return group["kl_weight"] / (group["num_data"] * group["initial_std"] ** 2) - damping(group)

    def pending(self) -> list[Tensor]:
        """What passes since the last step have summed beside gradients, to be added up over processes."""
        states = [self.state[p] for _, p in self.parameters()]
        return [state[key] for state in states for key in self.sums if key in state]

    #: Names of what is summed over passes.
    sums: tuple[str, ...] = ()

    def add(self, p: Tensor, **values: Tensor) -> None:
        """Add to what is summed over passes for one parameter."""
        state = self.state[p]
        for key, value in values.items():
            state[key] = state[key].add_(value) if key in state else value


def damping(group: dict[str, Any]) -> float:
    """γ_in = λ / (N η), the prior's precision per data point; η is the prior's variance."""
    return group["kl_weight"] / (group["num_data"] * group["prior_std"] ** 2)


def counted(group: dict[str, Any]) -> bool:
    """Whether the square of a mean gradient is multiplied by its rows."""
    return group.get("count_rows", True)

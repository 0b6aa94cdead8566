"""The implicit paper's Figure 2: its components on the loss surface, in the plane that holds most of their spread.

Eight networks trained from different starts stand beside the eight components, for what a plane through several
modes looks like.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dubito import DeepEnsemble
from dubito.data import Part
from dubito.inference.implicit import ImplicitPosterior
from dubito.networks import duplicate
from dubito.posterior import Posterior

from ..runner.experiment import Cell, Claim, Metric, Outcome, Table
from ..settings import explicit
from .fashion import DATA, DIFFERS, IMPLICIT, Fit, Images, Judged, experiment, predicted, tested, trained


@dataclass(frozen=True, kw_only=True)
class Surface(Judged):
    """What is looked at around a trained posterior.

    Args:
        places: values of each coordinate of the plane.
        between: networks on the way from one component to another.
        num_seen: images of training and test on which surfaces and ways are computed, the first so many.
    """

    places: int = 17
    between: int = 7
    num_seen: int = 1_000


@dataclass(frozen=True)
class Plane:
    """The plane of the first two principal components of K points [K, P], around their mean."""

    origin: Tensor  # [P]
    axes: Tensor  # [2, P], orthonormal
    explained: float  # share of the points' variance in the plane

    @classmethod
    def through(cls, points: Tensor) -> "Plane":
        """The plane nearest to some points."""
        origin = points.mean(0)
        _, values, axes = torch.linalg.svd(points - origin, full_matrices=False)
        shares = values.square() / values.square().sum()
        return cls(origin, axes[:2], float(shares[:2].sum()))

    def project(self, points: Tensor) -> Tensor:
        """Coordinates [..., 2] of the places nearest to some points."""
        return (points - self.origin) @ self.axes.mT

    def lift(self, places: Tensor) -> Tensor:
        """Points [..., P] at some coordinates."""
        return self.origin + places @ self.axes


def component_weights(posterior: Posterior) -> tuple[Tensor, Tensor]:
    """Weights W(k) = U diag(μ_k) of all components, [K, P], and the shared U [Eq. 11]; of networks, their mean."""
    if isinstance(posterior, ImplicitPosterior):
        means = [posterior.component(k).fold("mean") for k in range(posterior.num_components)]
        return torch.stack([vector(net) for net in means]), vector(posterior.network)
    points = torch.stack([vector(posterior.fold(k)) for k in range(posterior.num_components)])
    return points, points.mean(0)


def vector(net: nn.Module) -> Tensor:
    """All weights of a network, and what batch norm has counted, [P]."""
    return parameters_to_vector(moving(net)).detach()


def moving(net: nn.Module) -> list[Tensor]:
    """Parameters and buffers that are no counts."""
    return [*net.parameters(), *(buffer for buffer in net.buffers() if buffer.is_floating_point())]


@torch.no_grad()
def losses(net: nn.Module, points: Tensor, part: Part) -> Tensor:
    """NLL and accuracy of networks with weights `points` [..., P], [..., 2]; `net` is changed."""
    inputs, labels = part
    found = []
    for point in points.reshape(-1, points.shape[-1]):
        vector_to_parameters(point, moving(net))
        logits = net(inputs)
        right = (logits.argmax(-1) == labels).double().mean()
        found.append(torch.stack([F.cross_entropy(logits, labels).double(), right]))
    return torch.stack(found).view(*points.shape[:-1], 2)


def barrier(net: nn.Module, points: Tensor, part: Part, between: int) -> float:
    """How far the NLL rises above the straight line between two points on the way, mean over all pairs."""
    ends = losses(net, points, part)[:, 0]
    steps = torch.linspace(0, 1, between + 2, dtype=points.dtype)[1:-1, None]
    heights = []
    for first, second in combinations(range(len(points)), 2):
        way = losses(net, torch.lerp(points[first], points[second], steps), part)[:, 0]
        line = torch.lerp(ends[first], ends[second], steps[:, 0].double())
        heights.append((way - line).max().clamp_min(0))
    return float(torch.stack(heights).mean())


def run_plane(cell: Cell, clothes: Images, settings: Surface, steps: int | None) -> Outcome:
    """The surface around one posterior, and what lies between its components."""
    posterior = trained(settings.fit, clothes, cell.seed, steps)
    points, centre = component_weights(posterior)
    net = duplicate(posterior.network).eval()
    seen = {
        name: Part(part.inputs[: settings.num_seen], part.targets[: settings.num_seen])
        for name, part in (("train", clothes.train), ("test", clothes.test))
    }
    plane = Plane.through(points)
    places, marked = plane.project(points), plane.project(centre)
    xs, ys = window(torch.cat([places, marked[None]]), steps or settings.places)
    grid = plane.lift(torch.cartesian_prod(xs, ys).view(len(xs), len(ys), 2))
    inputs, labels = (tensor[: settings.num_test] for tensor in clothes.test)
    draws = predicted(posterior, inputs, steps or settings.num_samples, cell.seed)
    alone = losses(net, points, Part(inputs, labels)).mean(0)
    whole = tested(draws, labels) if isinstance(posterior, ImplicitPosterior) else None
    return Outcome(
        metrics={
            "barrier": barrier(net, points, seen["train"], steps or settings.between),
            "centre_nll": float(losses(net, centre[None], Part(inputs, labels))[0, 0]),
            "nll": float(alone[0]) if whole is None else whole["nll"],
            "error": 100 * float(1 - alone[1]) if whole is None else whole["error"],
            "component_nll": float(alone[0]),
            "spread": float((points - centre).norm(dim=1).mean() / centre.norm()),
            "explained": plane.explained,
        },
        details={
            "x": rounded(xs),
            "y": rounded(ys),
            "components": rounded(places),
            "centre": rounded(marked),
            **{
                f"{name}_{kind}": rounded(values)
                for name, part in seen.items()
                for kind, values in zip(("nll", "accuracy"), losses(net, grid, part).unbind(-1), strict=True)
            },
        },
    )


def window(places: Tensor, count: int) -> Sequence[Tensor]:
    """Values of both coordinates around some places, half their range beyond them on either side."""
    low, high = places.aminmax(dim=0)
    margin = (high - low) / 2
    return [torch.linspace(float(a), float(b), count) for a, b in zip(low - margin, high + margin, strict=True)]


def rounded(values: Tensor) -> Any:
    """Numbers to draw from."""
    return torch.round(values.double(), decimals=4).tolist()


#: Point estimates from as many starts as the implicit network has components.
PLAIN = explicit(DeepEnsemble, members=IMPLICIT.components)

TABLES = (
    Table(
        name="implicit-figure-2",
        title="Fashion-MNIST, components of a LeNet on its loss surface beside networks from eight starts",
        paper="implicit BNN, Figure 2 (a picture, without numbers)",
        plus_minus="none",
        experiment=experiment(
            "implicit-plane",
            {(DATA, "implicit"): Surface(fit=Fit(method=IMPLICIT)), (DATA, "plain"): Surface(fit=Fit(method=PLAIN))},
            run_plane,
            beside=60.0,
        ),
        metrics=(
            Metric(name="barrier", title="rise of the training NLL between two", lower_is_better=True),
            Metric(name="nll", title="test NLL", lower_is_better=True),
            Metric(name="error", title="test error (%)", lower_is_better=True),
            Metric(name="component_nll", title="test NLL of one alone", lower_is_better=True),
            Metric(name="centre_nll", title="test NLL in their middle", lower_is_better=True),
            Metric(name="spread", title="distance from the middle over its norm", lower_is_better=False),
            Metric(name="explained", title="share of the spread in the plane", lower_is_better=False),
        ),
        published={},
        claims=(
            Claim(
                text="the components share one wide mode: less lies between two of them than between two networks",
                metric="barrier",
                better="implicit",
                than="plain",
                data=(DATA,),
            ),
            Claim(
                text="which generalises better than one network",
                metric="nll",
                better="implicit",
                than="plain",
                data=(DATA,),
            ),
        ),
        differs=f"the networks from eight starts are ours, their NLL and error those of one network; {DIFFERS}",
    ),
)

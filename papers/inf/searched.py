"""INF, Table 2 and Figures 6 and 7, by the search the paper makes: pairs of prior precision and data scale.

Every Laplace structure stands around one trained network and takes, of some pairs, the one whose draws predict
validation images best; predictions are then made by draws. Out-of-distribution images and test images choose nothing.
CIFAR-100's test images stand in the place of SVHN, CIFAR-10 in that of ImageNet.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import MAP, SWA, SWAG, Categorical, DeepEnsemble, Laplace, MCDropout, metrics, seeds
from dubito.data import Part
from dubito.inference.laplace import LaplacePosterior
from dubito.inference.map import PointPosterior
from dubito.inference.swag import SWAGPosterior
from dubito.models import lenet, resnet18, vgg
from dubito.networks import duplicate
from dubito.posterior import Posterior
from dubito.prediction import CategoricalPrediction
from dubito.shifts import detection, ood_pair
from dubito.training import Training

from ..runner import provenance
from ..runner.experiment import Cell, Experiment, Outcome, Scale, Variant
from ..settings import explicit
from .table_2 import STRUCTURES, Images, first
from .table_3_trained import kernels

MNIST, VGG, RESNET = "mnist/notmnist", "cifar10/cifar100-vgg", "cifar10/cifar100-resnet18"
CIFAR = (VGG, RESNET)
NETWORKS: Mapping[str, Callable[..., nn.Module]] = {
    MNIST: partial(lenet, channels=(6, 16), dense=(84,), same_padding=False),
    VGG: partial(vgg, ((16, 16), (32, 32), (64, 64)), (64, 64), batch_norm=True),
    RESNET: partial(resnet18, base=16, num_classes=10, small_images=True),
}
AVERAGED = ("nn", "swa", "swag")


@dataclass(frozen=True, kw_only=True)
class Search:
    """How one network is trained, its pair of scales searched, and judged.

    Args:
        rows: training images.
        side: pixels of an image's side, to which it is averaged down.
        judged: test images, and as many out-of-distribution ones.
        validation: images that judge pairs.
        epochs: passes over the training images.
        batch_size: images per step.
        lr: of Adam, constant.
        weight_decay: the paper's L2 coefficient.
        trials: pairs of prior precision and data scale.
        search_samples: draws that judge a pair, unless it is dropped before.
        num_samples: draws of a prediction.
        refresh_rows: training images from which SWAG's draws take batch norm's statistics.
        members: of the ensemble.
        rate: of dropout.
    """

    rows: int = 50_000
    side: int = 28
    judged: int = 10_000
    validation: int = 2_000
    epochs: int = 20
    batch_size: int = 100
    lr: float = 1e-3
    weight_decay: float = 1e-8
    trials: int = 300
    search_samples: int = 30
    num_samples: int = 30
    refresh_rows: int = 5_000
    members: int = 5
    rate: float = 0.2


def load_cell(cell: Cell) -> Images:
    """Images inside and out of the distribution, scaled alike."""
    pair = ood_pair("mnist/notmnist") if cell.data == MNIST else ood_pair("cifar10/cifar100", validation=0.1)
    assert pair.inside.validation is not None
    return Images(pair.inside.train, pair.inside.validation, pair.inside.test, pair.outside)


def generate_cell(cell: Cell) -> Images:
    """Made-up images."""
    stream = seeds.generator(cell.seed, "made-up images", cell.data)
    shape = (24, 1, 28, 28) if cell.data == MNIST else (24, 3, 32, 32)
    part = Part(torch.randn(shape, generator=stream), torch.arange(24) % 10)
    return Images(part, part, part, torch.rand(shape, generator=stream))


def shared_work(cell: Cell) -> tuple:
    """The trainings of one network."""
    return cell.data, cell.seed


def run_cells(cells: Sequence[Cell], data: Sequence[Images], settings: Search, steps: int | None) -> list[Outcome]:
    """Train, search, judge."""
    return [run_seed(cell, images, settings, steps) for cell, images in zip(cells, data, strict=True)]


#: Point estimates and averages along a run: trained once and kept for the turn of all that stand around them.
_trained: dict[tuple, tuple[Posterior, list]] = {}


def sized(part: Part, rows: int, side: int) -> Part:
    """The first images, averaged down."""
    return Part(shrunk(part.inputs[:rows], side), part.targets[:rows])


def shrunk(inputs: Tensor, side: int) -> Tensor:
    """Images of fewer pixels: means over squares."""
    return F.avg_pool2d(inputs, inputs.shape[-1] // side) if inputs.shape[-1] > side else inputs


def run_seed(cell: Cell, images: Images, settings: Search, steps: int | None) -> Outcome:
    """One method, one seed."""
    posterior, details = fitted(cell, images, settings, steps)
    samples = settings.num_samples if steps is None else steps
    test = sized(images.test, settings.judged, settings.side)
    outside_inputs = shrunk(images.outside[: settings.judged], settings.side)
    inside = posterior.predict(test.inputs, samples, seed=cell.seed)
    outside = posterior.predict(outside_inputs, samples, seed=cell.seed)
    assert isinstance(inside, CategoricalPrediction) and isinstance(outside, CategoricalPrediction)
    entropies = [metrics.normalised_entropy_per_example(part.probs) for part in (inside, outside)]
    curve = metrics.reliability_curve(inside.probs, test.targets)
    shapes = {
        "reliability": {
            "count": curve.count.tolist(),
            "confidence": curve.confidence.nan_to_num().tolist(),
            "accuracy": curve.accuracy.nan_to_num().tolist(),
        },
        "entropies": {
            name: (torch.histc(values.float(), 20, 0, 1) / len(values)).tolist()
            for name, values in zip(("inside", "outside"), entropies, strict=True)
        },
    }
    return Outcome(
        metrics={
            "accuracy": metrics.accuracy(inside.probs, test.targets),
            "ece": metrics.ece(inside.probs, test.targets),
            "entropy": float(entropies[1].mean()),
            "auroc": detection(inside, outside)["total"].auroc,
            "nll": -float(inside.log_prob(test.targets).mean()),
            "entropy_inside": float(entropies[0].mean()),
            "numbers": numbers(posterior),
        },
        details={**details, **shapes, "entropy_std": float(entropies[1].std())},
    )


def numbers(posterior: Posterior) -> float:
    """Numbers that are kept beside the weights, for every weight that has a distribution; INF's Table 3 as a ratio."""
    stored = sum(tensor.numel() for tensor in posterior.tensors.state_dict().values())
    parameters = dict(posterior.network.named_parameters())
    names = parameters
    if isinstance(posterior, LaplacePosterior):
        names = [name for block in posterior.blocks.values() for name in block.parameters]
    return stored / sum(parameters[name].numel() for name in names)


def fitted(cell: Cell, images: Images, settings: Search, steps: int | None) -> tuple[Posterior, dict[str, float]]:
    """The method's posterior, and what was chosen for it."""
    train = sized(images.train, settings.rows, settings.side)
    training = explicit(
        Training,
        epochs=settings.epochs if steps is None else None,
        iterations=steps,
        batch_size=settings.batch_size,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
    )
    net, likelihood = NETWORKS[cell.data](seed=cell.seed), explicit(Categorical)
    fit = partial(provenance.fit, net=net, data=train, likelihood=likelihood, training=training, seed=cell.seed)
    key = (cell.data, cell.seed, len(train.targets), settings, steps)
    if cell.method in ("mc-dropout", "deep-ensemble"):
        dropout = explicit(MCDropout, rate=settings.rate)
        return fit(dropout if cell.method == "mc-dropout" else explicit(DeepEnsemble, members=settings.members)), {}
    if cell.method in ("swa", "swag"):
        averages = provenance.shared(_trained, (*key, "averages"), partial(fit, explicit(SWAG)))
        assert isinstance(averages, SWAGPosterior)
        if cell.method == "swa":
            return mean_of(averages), {}
        samples = settings.num_samples if steps is None else steps
        return averages.refreshed(first(train, settings.refresh_rows), num_samples=samples, seed=cell.seed), {}
    point = provenance.shared(_trained, (*key, "point"), partial(fit, explicit(MAP)))
    if cell.method == "nn":
        return point, {}
    network = point.fold(0)
    around = explicit(Laplace, structure=STRUCTURES[cell.method], subset=kernels(network), linearised=False)
    posterior = provenance.fit(around, network, train, likelihood, seed=cell.seed)
    assert isinstance(posterior, LaplacePosterior)
    chosen = posterior.tuned(
        validation=sized(images.validation, settings.validation, settings.side),
        predictive="draws",
        trials=settings.trials if steps is None else 2 * steps,
        num_samples=settings.search_samples if steps is None else steps,
        seed=cell.seed,
    )
    assert isinstance(chosen.prior_precision, float)
    return chosen, {"prior_precision": chosen.prior_precision, "data_scale": chosen.data_scale / chosen.num_data}


def mean_of(averages: SWAGPosterior) -> PointPosterior:
    """SWA: the mean that SWAG stands around, of the same run."""
    network, likelihood = duplicate(averages.network), duplicate(averages.likelihood)
    return PointPosterior(network, likelihood, method=explicit(SWA), trainable=averages.trainable).finished()


def variants(settings: Mapping[str, Search], seconds: Mapping[str, tuple[float, float]]) -> dict:
    """Every network and method; `seconds` of a training, and of a search with its predictions."""
    found = {}
    for data, setting in settings.items():
        training, search = seconds[data]
        costs = {"nn": training, "swa": 0.05 * search, "swag": training} | dict.fromkeys(STRUCTURES, search)
        costs |= {"mc-dropout": training, "deep-ensemble": training * setting.members} if data == MNIST else {}
        found |= {(data, method): Variant(settings=setting, cpu_seconds=cost) for method, cost in costs.items()}
    return found


def experiment(name: str, small: Scale, paper: Scale) -> Experiment:
    """One half of the paper's table."""
    return Experiment(
        paper="inf",
        name=name,
        scales={"small": small, "paper": paper},
        load=load_cell,
        generate=generate_cell,
        run=run_cells,
        shares=shared_work,
    )


_SMALL: dict[str, int] = {"search_samples": 8, "num_samples": 20, "refresh_rows": 500}
_PARTS: dict[str, int] = {"rows": 4_000, "judged": 1_000, "validation": 500, "side": 16, "trials": 40, **_SMALL}
SMALL = {
    MNIST: Search(rows=5_000, judged=2_000, validation=1_000, trials=100, **_SMALL),
    VGG: Search(epochs=10, **_PARTS),
    RESNET: Search(epochs=6, **_PARTS),
}
PAPER = {MNIST: Search(), VGG: Search(side=32, epochs=100), RESNET: Search(side=32, epochs=100)}
DIGITS = experiment(
    "inf-searched-mnist",
    Scale(
        variants=variants({MNIST: SMALL[MNIST]}, {MNIST: (12.0, 25.0)}),
        seeds=3,
        smaller="5,000 training images, 2,000 images judged, 1,000 validation images; 100 pairs of 300, judged by at "
        "most 8 draws; 20 draws of a prediction",
    ),
    Scale(variants=variants({MNIST: PAPER[MNIST]}, {MNIST: (150.0, 500.0)}), seeds=3),
)
OBJECTS = experiment(
    "inf-searched-cifar",
    Scale(
        variants=variants({data: SMALL[data] for data in CIFAR}, {VGG: (16.0, 18.0), RESNET: (60.0, 60.0)}),
        seeds=3,
        smaller="images averaged down to 16 × 16, 4,000 training images, 10 epochs (ResNet-18: 6), 1,000 images "
        "judged, 500 validation images; 40 pairs of 300, judged by at most 8 draws; 20 draws of a prediction",
    ),
    Scale(variants=variants({data: PAPER[data] for data in CIFAR}, {VGG: (6e3, 6e3), RESNET: (2e4, 2e4)}), seeds=3),
)

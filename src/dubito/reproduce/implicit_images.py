"""The implicit paper's Figures 4 and 8 on Fashion-MNIST: error by width, and doubt under noise in the images."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import metrics, seeds
from ..data import Part, load
from ..inference.implicit import Implicit
from ..inference.mc_dropout import MCDropout
from ..inference.mean_field import MeanField
from ..likelihoods import Categorical
from ..method import Method
from ..models import lenet
from ..posterior import Posterior
from ..prediction import CategoricalPrediction
from ..training import KL, Training
from .experiment import Cell, Claim, Experiment, Metric, Outcome, Scale, Table, Variant

DATA = "fashion-mnist"
WIDTHS = (1, 2, 4, 8)
LEVELS = (0.0, 0.2, 0.4, 0.6, 0.8)
KINDS = ("gaussian", "salt-and-pepper")
#: CPU-seconds of an epoch of the plain network on 50,000 images, by width.
EPOCH_SECONDS = {1: 4.8, 2: 8.0, 4: 19.0, 8: 58.0}
#: Training images, of which the small scale takes the first 10,000.
IMAGES = 50_000


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One LeNet.

    Args:
        method: with its settings.
        width: factor on the layers' widths.
        epochs: passes over the images.
        num_images: the first so many.
        lr: learning rate of Adam.
        variational_lr: of factors and standard deviations.
        kl_warmup: epochs over which the divergence's weight rises to 1.
        num_samples: draws at test time.
        num_test: test images, the first so many.
    """

    method: Method
    width: int = 1
    epochs: int = 300
    num_images: int = IMAGES
    lr: float = 1e-3
    variational_lr: float = 1e-2
    kl_warmup: float = 200.0
    num_samples: int = 20
    num_test: int = 10_000


@dataclass(frozen=True, kw_only=True)
class Clothes:
    """Images with values from 0 to 1."""

    train: Part
    test: Part


def load_cell(cell: Cell) -> Clothes:
    """Fashion-MNIST without its validation images."""
    data = load(DATA, standardise=False)
    return Clothes(train=data.train, test=data.test)


def generate_cell(cell: Cell) -> Clothes:
    """Made-up images."""
    stream = seeds.generator(cell.seed, "made-up clothes")
    parts = [Part(torch.rand(16, 1, 28, 28, generator=stream), torch.arange(16) % 10) for _ in range(2)]
    return Clothes(train=parts[0], test=parts[1])


def trained(cell: Cell, clothes: Clothes, settings: Fit, steps: int | None) -> Posterior:
    """The posterior of a cell."""
    chosen = slice(settings.num_images)
    net = lenet(channels=(6, 16), dense=(120, 64), same_padding=False, width=settings.width, seed=cell.seed)
    training = Training(
        epochs=settings.epochs if steps is None else None,
        iterations=steps,
        batch_size=128,
        lr=settings.lr,
        variational_lr=settings.variational_lr,
        kl=KL(warmup=settings.kl_warmup),
    )
    train = (clothes.train.inputs[chosen], clothes.train.targets[chosen])
    return settings.method.fit(net, train, Categorical(), training=training, seed=cell.seed, progress=False)


def run_widths(
    cells: Sequence[Cell], data: Sequence[Clothes], settings: Fit, steps: int | None
) -> list[Outcome]:
    """Error of the test images."""
    outcomes = []
    for cell, clothes in zip(cells, data, strict=True):
        posterior = trained(cell, clothes, settings, steps)
        inputs, labels = clothes.test.inputs[: settings.num_test], clothes.test.targets[: settings.num_test]
        prediction = posterior.predict(inputs, steps or settings.num_samples, seed=cell.seed)
        assert isinstance(prediction, CategoricalPrediction)
        found = {
            "error": 100 * (1 - metrics.accuracy(prediction.probs.double(), labels)),
            "nll": -float(prediction.log_prob(labels).double().mean()),
        }
        outcomes.append(Outcome(metrics=found, details={"parameters": posterior.num_parameters}))
    return outcomes


def corrupted(images: Tensor, kind: str, level: float, seed: int) -> Tensor:
    """Images with noise: (1 − γ) x + γ ε [Eq. 28], or each pixel set to 0 or 1 with probability p."""
    stream = seeds.generator(seed, "corrupted", kind, device=images.device)
    if kind == "gaussian":
        noise = torch.randn(images.shape, generator=stream, dtype=images.dtype, device=images.device)
        return (1 - level) * images + level * noise
    drawn = torch.rand((2, *images.shape), generator=stream, dtype=images.dtype, device=images.device)
    return torch.where(drawn[0] < level, (drawn[1] < 0.5).to(images.dtype), images)


def run_noise(
    cells: Sequence[Cell], data: Sequence[Clothes], settings: Fit, steps: int | None
) -> list[Outcome]:
    """Mean entropies at every level of the noise that the cell's data is named after."""
    outcomes = []
    for cell, clothes in zip(cells, data, strict=True):
        posterior = trained(cell, clothes, settings, steps)
        found: dict[str, float] = {}
        for level in LEVELS:
            images = corrupted(clothes.test.inputs[: settings.num_test], cell.data, level, cell.seed)
            prediction = posterior.predict(images, steps or settings.num_samples, seed=cell.seed)
            assert isinstance(prediction, CategoricalPrediction)
            for name in ("total", "aleatoric", "epistemic"):
                found[f"{name}-{level:g}"] = float(getattr(prediction, name).double().mean())
        last = f"{LEVELS[-1]:g}"
        found["rise"] = found[f"total-{last}"] - found["total-0"]
        found["share"] = found[f"epistemic-{last}"] / max(found[f"total-{last}"], 1e-12)
        outcomes.append(Outcome(metrics=found))
    return outcomes


IMPLICIT = Implicit(components=8, noise_samples=2, prior_std=0.3, mean_std=0.75)
MEAN_FIELD = MeanField(prior_std=1.0)
SMALL = {"epochs": 6, "num_images": 10_000, "kl_warmup": 4.0, "num_test": 2_000}


def seconds(settings: Fit, cost: float = 1.3) -> float:
    """Estimated cost of one run."""
    return 10 + cost * settings.epochs * EPOCH_SECONDS[settings.width] * settings.num_images / IMAGES


def width_variants(**changes: float) -> dict[tuple[str, str], Variant]:
    """Both methods at all widths."""
    found = {}
    for width in WIDTHS:
        for name, method in (("implicit", IMPLICIT), ("mean-field", MEAN_FIELD)):
            settings = Fit(method=method, width=width, **changes)  # pyright: ignore[reportArgumentType]
            found[DATA, f"{name}-{width}"] = Variant(settings=settings, cpu_seconds=seconds(settings))
    return found


def noise_variants(**changes: float) -> dict[tuple[str, str], Variant]:
    """Both methods under both kinds of noise."""
    found = {}
    for kind in KINDS:
        for name, method in (("implicit", IMPLICIT), ("mc-dropout", MCDropout(rate=0.3))):
            settings = Fit(method=method, **changes)  # pyright: ignore[reportArgumentType]
            found[kind, name] = Variant(settings=settings, cpu_seconds=seconds(settings))
    return found


SMALLER = "10,000 images for 50,000, 6 epochs for 300, 2,000 test images for 10,000"
TABLES = (
    Table(
        name="implicit-figure-4",
        title="Fashion-MNIST, error of LeNets of growing width",
        paper="implicit BNN, Figure 4",
        plus_minus="the paper gives none",
        experiment=Experiment(
            name="implicit-widths",
            scales={
                "small": Scale(variants=width_variants(**SMALL), seeds=2, smaller=SMALLER),
                "paper": Scale(variants=width_variants(), seeds=5),
            },
            load=load_cell,
            generate=generate_cell,
            run=run_widths,
        ),
        metrics=(
            Metric(name="error", title="error (%)", lower_is_better=True),
            Metric(name="nll", title="NLL", lower_is_better=True),
        ),
        published={},
        claims=(
            Claim(
                text="at eight times the width the implicit network errs less than mean field",
                metric="error",
                better="implicit-8",
                than="mean-field-8",
                data=(DATA,),
            ),
            Claim(
                text="the implicit network errs less at eight times the width than at once",
                metric="error",
                better="implicit-8",
                than="implicit-1",
                data=(DATA,),
            ),
        ),
        differs="optimiser and settings are not stated: Adam, the VGG-16's prior and start of Table 2",
    ),
    Table(
        name="implicit-figure-8",
        title="Fashion-MNIST, entropies under noise in the images",
        paper="implicit BNN, Figure 8",
        plus_minus="the paper gives none",
        experiment=Experiment(
            name="implicit-noise",
            scales={
                "small": Scale(variants=noise_variants(**SMALL), seeds=2, smaller=SMALLER),
                "paper": Scale(variants=noise_variants(), seeds=5),
            },
            load=load_cell,
            generate=generate_cell,
            run=run_noise,
        ),
        metrics=(
            Metric(name="rise", title="rise of the entropy to the last level", lower_is_better=False),
            Metric(name="share", title="epistemic share at the last level", lower_is_better=False),
            *(
                Metric(name=f"{name}-{level:g}", title=f"{name} at {level:g}", lower_is_better=False)
                for name in ("total", "aleatoric", "epistemic")
                for level in LEVELS
            ),
        ),
        published={},
        claims=(
            Claim(
                text="more of the implicit network's doubt is epistemic than of MC dropout's",
                metric="share",
                better="implicit",
                than="mc-dropout",
                data=KINDS,
            ),
        ),
        differs="Fashion-MNIST and a LeNet in place of CIFAR-10 and a Wide ResNet-28-10",
    ),
)

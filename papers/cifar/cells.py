"""Cells of the reduced CIFAR-10: a trained posterior, and all that tables and figures read of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dubito import DeepEnsemble, Flipout, MeanField
from dubito.posterior import Posterior

from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Scale, Variant
from ..settings import explicit
from .fits import DATA, Fit, first_std, last_std, trained
from .images import Pictures, Pixels, generate_cell, load_cell, pictures
from .scores import judged

METRICS = (
    Metric(name="nll", title="NLL", lower_is_better=True),
    Metric(name="accuracy", title="accuracy (%)", lower_is_better=False),
    Metric(name="ece", title="ECE", lower_is_better=True),
    Metric(name="c_nll", title="cNLL", lower_is_better=True),
    Metric(name="c_accuracy", title="cA (%)", lower_is_better=False),
    Metric(name="c_ece", title="cECE", lower_is_better=True),
    Metric(name="auroc", title="AUROC of CIFAR-100", lower_is_better=False),
    Metric(name="bytes", title="bytes", lower_is_better=True),
    Metric(name="seconds", title="CPU-seconds of training", lower_is_better=True),
)
#: The prior is all that shrinks kernels; biases and batch norm are points.
MEAN_FIELD = explicit(MeanField, prior_std=0.1, estimator=explicit(Flipout))
NORMAL_KERNELS = {"kernels": True, "weight_decay": 0.0}
#: What stands in a table whose cells leave corrupted images out.
CLEAN = tuple(metric for metric in METRICS if not metric.name.startswith("c_"))
#: CPU-seconds of an image that goes forth and back through the plain networks, and of a draw for all images of a test.
STEP_SECONDS = {"wide-resnet": 3.3e-4, "vgg": 3.4e-4}
DRAW_SECONDS, CLEAN_SECONDS = 7.0, 2.2
#: What every reduced table says of itself.
SMALLER = (
    "45,000 images of 16×16 (pooled from 32×32) for 50,000 of 32×32, Wide ResNet-10-1 for 28-10, 6 epochs for 200 to "
    "250, 3 seeds for 10"
)
TABLE_2 = (
    "a cosine from 0.2 for steps from 0.1, weight decay 5e-4 for 2e-4; means start at N(1, 0.1²) for random signs, in "
    "BatchEnsemble as in rank-1, and factors learn at ten times the weights' rate, without which standard deviations "
    "stay where they start (Normal ones of .032 end near .037); each of 4 components sees all 128 images of a step (a "
    "tile), and divergences are summed over components, their weight 1 after 4 of 6 epochs for 200 of 250; 8 draws for "
    "4 to 16; settings were chosen on 5,000 training images"
)
DIFFERS = (
    "corruptions are made anew from the first 500 test images, by CIFAR-10-C's constants, and pooled; out of "
    "distribution are the first 5,000 test images of CIFAR-100, told by predictive entropy; training images are "
    "mirrored and shifted by up to 2 pixels"
)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A training and how it is judged.

    Args:
        fit: the training.
        num_samples: draws at test time, in all.
        shifted: whether corrupted images are judged too, which take two thirds of the time of a test.
    """

    fit: Fit
    num_samples: int = 8
    shifted: bool = True


def run_cells(cells: Sequence[Cell], data: Sequence[Pixels], settings: Judged, steps: int | None) -> list[Outcome]:
    """One cell after the other."""
    return [run_cell(cell, pixels, settings, steps) for cell, pixels in zip(cells, data, strict=True)]


def run_cell(cell: Cell, pixels: Pixels, settings: Judged, steps: int | None) -> Outcome:
    """One method with one seed."""
    fit = settings.fit if steps is None else rehearsed(settings.fit)
    seen = pictures(pixels, fit.size)
    posterior, seconds = trained(fit, seen, cell.seed, steps)
    cut = replace(settings, fit=fit, num_samples=steps or settings.num_samples)
    return outcome_of(posterior, seconds, cut, seen, cell.seed)


def outcome_of(posterior: Posterior, seconds: float, settings: Judged, seen: Pictures, seed: int) -> Outcome:
    """All that is kept of a posterior.

    Args:
        posterior: trained.
        seconds: CPU time of its training.
        settings: how it was trained and is judged.
        seen: the images.
        seed: of the draws.
    """
    seen = seen if settings.shifted else replace(seen, corrupted={})
    values, facts = judged(posterior, seen, settings.num_samples, seed)
    facts |= {
        "parameters": posterior.num_parameters,
        "first_std": first_std(settings.fit.method),
        "last_std": last_std(posterior),
    }
    return Outcome(metrics=values | {"seconds": seconds}, details=facts)


def rehearsed(fit: Fit) -> Fit:
    """A network as small as its kind allows: two steps of the widest take minutes."""
    network = "vgg" if fit.network == "vgg16" else fit.network
    start = None if fit.start is None else rehearsed(fit.start)
    return replace(fit, network=network, width=1, base=8, depth=10, start=start)


def shared_work(cell: Cell) -> tuple[str, int]:
    """Cells of a seed may need the same plain run."""
    return DATA, cell.seed


def cost(settings: Judged) -> float:
    """CPU-seconds of a cell; ensembles find the first member trained."""
    fit = settings.fit
    method = fit.method
    width = (fit.base * fit.width / 16) ** 1.5 * (fit.depth / 10) * (fit.size / 16) ** 2
    if isinstance(method, DeepEnsemble):
        passes = float(method.members - 1)
    else:
        passes = PASSES.get(type(method).__name__, 1.0)
        passes *= getattr(method, "components", 1) if type(method).__name__ in TILED else 1
    step = STEP_SECONDS.get(fit.network, 1e-2)
    draws = 1 if type(method).__name__ == "MAP" else settings.num_samples
    return fit.num_images * fit.epochs * step * width * passes + draws * width * (
        DRAW_SECONDS if settings.shifted else CLEAN_SECONDS
    )


#: Methods whose components all see every image.
TILED = ("Rank1", "BatchEnsemble")
#: What a step costs beside a plain one, for each component of a tile.
PASSES = {"MCDropout": 1.3, "MeanField": 2.0, "BatchEnsemble": 1.3, "Rank1": 1.5, "Implicit": 1.5, "SWAG": 1.05}


def variants(settings: Mapping[str, Judged]) -> dict[tuple[str, str], Variant]:
    """Settings with their estimated costs."""
    return {(DATA, name): Variant(settings=value, cpu_seconds=cost(value)) for name, value in settings.items()}


def experiment(
    paper: str,
    name: str,
    small: Mapping[str, Judged],
    full: Mapping[str, Judged],
    smaller: str = SMALLER,
    run: Callable[..., Sequence[Outcome]] = run_cells,
) -> Experiment:
    """An experiment at both scales.

    Args:
        paper: its folder.
        name: of its results.
        small: settings that two CPU cores run.
        full: the paper's.
        smaller: what is smaller in the former.
        run: from cells, their images and settings to outcomes.
    """
    return Experiment(
        paper=paper,
        name=name,
        scales={
            "small": Scale(variants=variants(small), seeds=3, smaller=smaller),
            "paper": Scale(variants=variants(full), seeds=10),
        },
        load=load_cell,
        generate=generate_cell,
        run=run,
        shares=shared_work,
    )


def lower(text: str, better: str, than: str, metric: str = "nll") -> Claim:
    """Which of two methods is better by a metric."""
    return Claim(text=text, metric=metric, better=better, than=than, data=(DATA,))

"""The implicit paper's Figure 3: draws of the softmax for the images it is most and least sure of."""

import torch
from torch import Tensor

from ..runner.experiment import Cell, Claim, Metric, Outcome, Table
from .fashion import DATA, DIFFERS, IMPLICIT, Fit, Images, Judged, experiment, predicted, trained

#: The classes of the figure's columns.
CLASSES = range(4)
#: Images of each class that the numbers are means over; the first of each is the figure's.
IMAGES = 10


def run_extremes(cell: Cell, clothes: Images, settings: Judged, steps: int | None) -> Outcome:
    """How far draws differ on the images with the lowest or the highest predictive entropy."""
    posterior = trained(settings.fit, clothes, cell.seed, steps)
    inputs, labels = (tensor[: settings.num_test] for tensor in clothes.test)
    samples = steps or settings.num_samples
    doubt = predicted(posterior, inputs, samples, cell.seed)
    order = doubt.total.argsort(descending=cell.method == "highest")
    rows = torch.cat([order[labels[order] == label][:IMAGES] for label in CLASSES])
    probs = posterior.sample_outputs(inputs[rows], samples, seed=cell.seed).softmax(-1)  # [S, B, C]
    first = torch.tensor([int((labels[rows] == label).nonzero()[0]) for label in CLASSES])
    return Outcome(
        metrics={
            "disagreement": float(disagreement(probs).double().mean()),
            "total": float(doubt.total[rows].double().mean()),
            "epistemic": float(doubt.epistemic[rows].double().mean()),
        },
        details={
            "images": rows[first].tolist(),
            "probs": torch.round(probs[:, first].double(), decimals=3).transpose(0, 1).tolist(),  # [4, S, C]
        },
    )


def disagreement(probs: Tensor) -> Tensor:
    """Share of draws [S, B, C] that name another class than most draws do, [B]."""
    classes = probs.argmax(-1)  # [S, B]
    return (classes != classes.mode(0).values).to(probs.dtype).mean(0)


TABLES = (
    Table(
        name="implicit-figure-3",
        title="Fashion-MNIST, draws for the 10 surest and the 10 least sure test images of each of 4 classes",
        paper="implicit BNN, Figure 3 (a picture, without numbers)",
        plus_minus="none",
        experiment=experiment(
            "implicit-draws",
            {(DATA, end): Judged(fit=Fit(method=IMPLICIT)) for end in ("lowest", "highest")},
            run_extremes,
        ),
        metrics=(
            Metric(name="disagreement", title="draws for another class than most", lower_is_better=False),
            Metric(name="total", title="predictive entropy", lower_is_better=False),
            Metric(name="epistemic", title="epistemic part", lower_is_better=False),
        ),
        published={},
        claims=(
            Claim(
                text="the network returns diverse predictions where it is highly uncertain",
                metric="disagreement",
                better="highest",
                than="lowest",
                data=(DATA,),
            ),
        ),
        differs=DIFFERS,
    ),
)

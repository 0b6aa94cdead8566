"""Standard deviations of weights: their spectra, their pattern, and their way through training."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..distributions.spectrum import Spectrum, truncate
from ..errors import ConfigError, DataError, require_count
from ..hints import checked
from .axes import axis_of, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@checked
def explained_variance(
    spectra: Mapping[str, Spectrum], *, centred: bool = False, most: int = 20, axis: "Axes | None" = None
) -> "Axes":
    """Share of variance per singular value, of means (dashed) and of standard deviations, by layer.

    [k-tied Normal, Figures 3, 5 and 12]

    Args:
        spectra: what `posterior.spectrum()` gave.
        centred: of the matrices less the mean of their entries.
        most: singular values shown.
        axis: to draw on.
    """
    require_count(most=most)
    if not isinstance(spectra, Mapping) or not spectra:
        raise DataError(f"spectra must hold at least one layer's spectrum by name, got {spectra!r}")
    axis = axis_of(axis)
    for number, (name, spectrum) in enumerate(spectra.items()):
        mean, std = (spectrum.mean_centred, spectrum.std_centred) if centred else (spectrum.mean, spectrum.std)
        for shares, words, style in ((std, "std", "-"), (mean, "mean", "--")):
            values = shares[:most].detach().cpu()
            axis.plot(
                range(1, len(values) + 1),
                values.tolist(),
                style,
                marker=".",
                color=colour(number),
                label=f"{name}, {words}",
            )
    axis.set(xlabel="singular value", ylabel="share of variance" + (", centred" if centred else ""))
    axis.set_ylim(0, 1.02)
    axis.locator_params(axis="x", integer=True)
    axis.legend()
    return axis


@checked
def std_map(
    std: Tensor, *, rank: int | None = None, limits: tuple[float, float] | None = None, axis: "Axes | None" = None
) -> "Axes":
    """Heat map of a weight's standard deviations, inputs down and outputs across as the paper has them.

    [k-tied Normal, Figures 4 and 11]

    Args:
        std: σ as `posterior.weight_scale(name).std` gives it; a kernel is read as (inputs · positions) × outputs.
        rank: show the best approximation of this rank instead, with a lower bound of 0.
        limits: least and largest value of the colours, to compare maps; None takes those of `std`.
        axis: to draw on.
    """
    if not isinstance(std, Tensor) or std.ndim < 2 or not std.numel() or not std.isfinite().all():
        shown = tuple(std.shape) if isinstance(std, Tensor) else std
        raise DataError(f"std must be a matrix or a kernel of finite numbers, got {shown!r}")
    matrix = std.detach().flatten(1).cpu()
    lowest, highest = (matrix.min().item(), matrix.max().item()) if limits is None else limits
    if not lowest <= highest:
        raise ConfigError(f"limits must be a least and a largest value, got {limits!r}")
    title = "σ"
    if rank is not None:
        require_count(rank=rank)
        if rank > min(matrix.shape):
            raise ConfigError(f"rank must be at most {min(matrix.shape)}, the shorter side, got {rank}")
        left, right = truncate(matrix, rank)
        matrix, title = (left.mT @ right).clamp_min(0), f"σ, rank {rank}"
    axis = axis_of(axis)
    image = axis.imshow(
        matrix.mT.to(torch.float64).numpy(), vmin=lowest, vmax=highest, aspect="auto", interpolation="none"
    )
    axis.set(xlabel="output", ylabel="input", title=title)
    axis.get_figure(root=True).colorbar(image, ax=axis)  # pyright: ignore[reportOptionalMemberAccess]
    return axis


@checked
def stds_over_training(
    steps: Sequence[int],
    stds: Mapping[str, Sequence[float]],
    *,
    warmup: float = 0,
    prior_std: float | None = None,
    axis: "Axes | None" = None,
) -> "Axes":
    """Mean standard deviation of each layer along training.  [k-tied Normal, Figure 10]

    Args:
        steps: where they were looked at.
        stds: the means at each of these steps, by layer.
        warmup: the step at which the divergence had its full weight; the part before it is shaded.
        prior_std: drawn as a line to compare with.
        axis: to draw on.
    """
    if not isinstance(stds, Mapping) or not stds:
        raise DataError(f"stds must hold at least one layer's values by name, got {stds!r}")
    for name, values in stds.items():
        if len(values) != len(steps):
            raise DataError(f"stds must have a value for each of {len(steps)} steps, {name} has {len(values)}")
    axis = axis_of(axis)
    if warmup:
        axis.axvspan(0, warmup, color="0.9", label="divergence annealed")
    for number, (name, values) in enumerate(stds.items()):
        axis.plot(list(steps), list(values), color=colour(number), label=name)
    if prior_std is not None:
        axis.axhline(prior_std, color="0.5", linestyle=":", label="prior")
    axis.set(xlabel="step", ylabel="mean σ")
    axis.legend()
    return axis

"""Noise per row at half its price."""

import torch
from torch import Tensor


def halved(
    half: Tensor, rows: slice, generator: torch.Generator | None, *, passes: int = 0, axis: int = 0
) -> tuple[Tensor, Tensor]:
    """Some rows of noise whose second half is the first with other signs, and signs [P, nodes] for passes.

    Noise costs more than what is made of it, so two halves of the rows, and all passes, share its size with signs of
    their own: where its law is symmetric each draw has that law, and none is correlated with another.

    Args:
        half: noise of the first half of the rows, which stand on `axis`.
        rows: those to give.
        generator: of the signs.
        passes: P.
        axis: of the rows.
    """
    shape = (passes + 1, *half.shape[axis + 1 :])
    signs = torch.randint(2, shape, generator=generator, device=half.device).to(half.dtype).mul_(2).sub_(1)
    whole = torch.cat([half, half * signs[-1]], axis)
    return whole.narrow(axis, rows.start, rows.stop - rows.start), signs[:-1]

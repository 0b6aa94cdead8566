"""Distribution functions that PyTorch lacks: lower and upper tails, each with all its digits."""

import torch
from torch import Tensor

#: Terms of the continued fraction; with a and b up to 1e5 it has converged long before.
TERMS = 2000
TINY = 1e-300


def incomplete_beta(a: Tensor, b: Tensor, x: Tensor, complement: Tensor) -> tuple[Tensor, Tensor]:
    """I_x(a, b) and 1 − I_x(a, b), by the continued fraction of the smaller one (NIST Handbook, 8.17.22).

    Args:
        a: above 0.
        b: above 0.
        x: between 0 and 1.
        complement: 1 − x, without what subtracting would round off.
    """
    a, b, x, complement = torch.broadcast_tensors(*(value.double() for value in (a, b, x, complement)))
    swapped = x > (a + 1) / (a + b + 2)  # where the fraction of I_{1−x}(b, a) converges faster
    p, q = torch.where(swapped, b, a), torch.where(swapped, a, b)
    y, rest = torch.where(swapped, complement, x), torch.where(swapped, x, complement)
    beta = torch.lgamma(p) + torch.lgamma(q) - torch.lgamma(p + q)
    front = (torch.special.xlogy(p, y) + torch.special.xlogy(q, rest) - beta).exp() / p
    part = (front * _fraction(p, q, y)).clamp(0, 1)
    return torch.where(swapped, 1 - part, part), torch.where(swapped, part, 1 - part)


def _fraction(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """1 / (1 + d₁/(1 + d₂/(1 + …))) by Lentz's method."""
    c, d = torch.ones_like(x), 1 / _away(1 - (a + b) * x / (a + 1))
    value = d
    rounding = 1e-15 + torch.finfo(x.dtype).eps / 8 * (a + b)  # less than what the logarithms in front of it lose
    for m in range(1, TERMS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / _away(1 + term * d), _away(1 + term / c)
            change = c * d
            value = value * change
        if m % 8 == 0 and bool(((change - 1).abs() < rounding).all()):
            break
    return value


def _away(value: Tensor) -> Tensor:
    """Kept away from 0, by which Lentz's method divides."""
    return torch.where(value.abs() < TINY, TINY, value)


def student_t_tails(values: Tensor, df: Tensor) -> tuple[Tensor, Tensor]:
    """P(T ≤ t) and P(T > t) of Student's t with `df` degrees of freedom, standard scale."""
    values, df = values.double(), df.double()
    square = values.square()
    # P(|T| > |t|) = I_{ν/(ν + t²)}(ν/2, ½)
    beyond, _ = incomplete_beta(df / 2, torch.full_like(df, 0.5), df / (df + square), square / (df + square))
    below = torch.where(values < 0, beyond / 2, 1 - beyond / 2)
    above = torch.where(values < 0, 1 - beyond / 2, beyond / 2)
    return below, above


def count_tails(values: Tensor, rates: Tensor, total_count: Tensor | None) -> tuple[Tensor, Tensor]:
    """P(Y ≤ k) and P(Y > k) of a Poisson, or negative binomial, count with these means, at whole k ≥ −1."""
    following, rates = values.double() + 1, rates.double()
    if total_count is None:
        index, rates = torch.broadcast_tensors(following.clamp(min=1), rates)
        below, above = torch.special.gammaincc(index, rates), torch.special.gammainc(index, rates)
    else:
        count = total_count.double()
        success = count / (count + rates)
        below, above = incomplete_beta(count, following.clamp(min=1), success, rates / (count + rates))
    none = following <= 0
    return torch.where(none, 0.0, below), torch.where(none, 1.0, above)

"""Draws and divergences of many weights in one node, against torch's distributions and autograd."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from dubito.distributions import tied_functions
from dubito.weight_normals.scales import OwnScale, TiedScale, TruncatedScale, WeightScale
from dubito.weight_normals.terms import OwnTerm, Term, TiedTerm, summed

PRIOR = 0.4
SHAPES = {"vector": (6,), "matrix": (5, 7), "kernel": (4, 3, 2, 2)}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def divergence(mean: Tensor, std: Tensor, prior_std: float = PRIOR) -> Tensor:
    return kl_divergence(Normal(mean, std), Normal(torch.zeros_like(mean), prior_std)).sum()


def parameters(form: str, shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """The mean and what σ is made of."""
    if form == "own":
        made = [normal(*shape, seed=seed), normal(*shape, seed=seed + 1) - 1]
    else:
        rank, columns = int(form[0]), torch.Size(shape[1:]).numel()
        made = [normal(*shape, seed=seed), normal(rank, shape[0], seed=seed + 1) - 1]
        made.append(normal(rank, columns, seed=seed + 2) - 0.5)
    return [tensor.requires_grad_() for tensor in made]


def std_of(form: str, tensors: list[Tensor]) -> Tensor:
    if form == "own":
        return torch.log1p(tensors[1].exp())
    return torch.einsum("ai,aj->ij", tensors[1].exp(), tensors[2].exp()).reshape(tensors[0].shape)


def term_of(form: str, tensors: list[Tensor], noise: Tensor | None = None, centred: bool = False) -> Term:
    kind = OwnTerm if form == "own" else TiedTerm
    return kind(*tensors, prior_std=PRIOR, noise=noise, centred=centred)


def assert_same(ours: Tensor, expected: Tensor, tensors: list[Tensor]) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    found, wanted = (torch.autograd.grad(value, tensors, retain_graph=True) for value in (ours, expected))
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


FORMS = [("own", "vector"), ("own", "matrix"), ("own", "kernel")] + [
    (f"{rank}-tied", shape) for rank in (1, 2, 3) for shape in ("matrix", "kernel")
]


@pytest.mark.parametrize(("form", "shape"), FORMS)
@pytest.mark.parametrize("chunk", [1, 20, 2**16])
def test_divergences(form: str, shape: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied_functions, "CPU_CHUNK", chunk)
    tensors = parameters(form, SHAPES[shape])
    kl, draws = summed([term_of(form, tensors)])
    assert draws == []
    assert_same(kl, divergence(tensors[0], std_of(form, tensors)), tensors)


@pytest.mark.parametrize(("form", "shape"), FORMS)
@pytest.mark.parametrize("centred", [False, True])
def test_draws_with_their_divergences(form: str, shape: str, centred: bool) -> None:
    tensors = parameters(form, SHAPES[shape])
    noise, weights = normal(*SHAPES[shape], seed=8), normal(*SHAPES[shape], seed=9)
    std = std_of(form, tensors)
    kl, (draw,) = summed([term_of(form, tensors, noise.clone(), centred)])
    change = std * noise if centred else tensors[0] + std * noise
    wanted = divergence(tensors[0], std)
    assert_same((weights * draw).sum() + 0.3 * kl, (weights * change).sum() + 0.3 * wanted, tensors)
    assert_same(kl, wanted, tensors)  # a draw that is not used
    if not centred:  # σ ε alone does not depend on the mean
        assert_same((weights * draw).sum(), (weights * change).sum(), tensors)


def test_many_terms_of_all_kinds_are_one_sum() -> None:
    forms = [("own", "vector", False), ("2-tied", "matrix", True), ("own", "kernel", True), ("1-tied", "kernel", False)]
    tensors, terms, wanted, changes, weights = [], [], [], [], []
    for number, (form, shape, drawn) in enumerate(forms):
        own = parameters(form, SHAPES[shape], seed=10 * number)
        noise = normal(*SHAPES[shape], seed=100 + number)
        terms.append(term_of(form, own, noise.clone() if drawn else None))
        wanted.append(divergence(own[0], std_of(form, own)))
        if drawn:
            changes.append(own[0] + std_of(form, own) * noise)
            weights.append(normal(*SHAPES[shape], seed=200 + number))
        tensors += own
    kl, draws = summed(terms)
    assert len(draws) == 2
    ours = sum(((w * d).sum() for w, d in zip(weights, draws, strict=True)), 0.7 * kl)
    expected = sum(((w * c).sum() for w, c in zip(weights, changes, strict=True)), 0.7 * torch.stack(wanted).sum())
    assert isinstance(ours, Tensor) and isinstance(expected, Tensor)
    assert_same(ours, expected, tensors)


def scales() -> dict[str, tuple[WeightScale, list[Tensor]]]:
    own, tied = parameters("own", (5, 7)), parameters("2-tied", (5, 7))
    u, v = normal(2, 5, seed=4).abs() + 0.1, normal(2, 7, seed=5).abs()
    return {
        "own": (OwnScale(own[1]), own),
        "tied": (TiedScale(tied[1], tied[2], torch.Size((5, 7))), tied),
        "truncated": (TruncatedScale(u, v, 0.2, torch.Size((5, 7))), [normal(5, 7).requires_grad_()]),
    }


@pytest.mark.parametrize("name", ["own", "tied", "truncated"])
def test_every_form_of_spread_has_its_divergence(name: str) -> None:
    scale, tensors = scales()[name]
    kl, _ = summed([scale.term(tensors[0], 0.3)])
    assert_same(kl, divergence(tensors[0], scale.std, 0.3), tensors)


@pytest.mark.parametrize("name", ["own", "tied"])
def test_draws_with_and_without_divergence_are_the_same(name: str) -> None:
    scale, (mean, *_) = scales()[name]
    assert isinstance(scale, OwnScale | TiedScale)
    streams = [torch.Generator().manual_seed(3) for _ in range(3)]
    plain = scale.draw(mean, streams[0])
    _, (draw,) = summed([scale.draw_term(mean, PRIOR, streams[1], False)])
    with torch.no_grad():
        still = scale.draw(mean, streams[2])
    torch.testing.assert_close(draw, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(still, plain, rtol=1e-12, atol=1e-12)


def test_single_precision_keeps_its_digits() -> None:
    for form in ("own", "2-tied"):
        double = parameters(form, (30, 40))
        single = [tensor.detach().float().requires_grad_() for tensor in double]
        kl, _ = summed([term_of(form, single)])
        truth, _ = summed([term_of(form, double)])
        assert kl.dtype == torch.float32
        assert kl.item() == pytest.approx(truth.item(), rel=2e-6)


def test_a_divergence_of_ties_keeps_nothing_of_the_matrixs_size() -> None:
    tensors = parameters("2-tied", (60, 80))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        summed([term_of("2-tied", tensors)])
    assert kept
    assert [t for t in kept if t.numel() >= 60 * 80 and t.data_ptr() != tensors[0].data_ptr()] == []

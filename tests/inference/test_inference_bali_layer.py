"""BALI's layer: its averages and its regression against Algorithm 1 written densely."""

import math

import pytest
import torch
from torch import Tensor

from dubito.distributions import MatrixNormalInverseWishart
from dubito.errors import TrainingError
from dubito.inference.bali.layer import Layer, Prior, placed

K, M, N = 3, 2, 4
RATES = (0.3, 0.3, 0.1, 0.02)
DATA, FLOOR, PRECISION, STEP = 50.0, 0.01, 0.25, 0.3


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(dtype: torch.dtype = torch.float64, floor: float = FLOOR) -> Layer:
    like = torch.ones(K, dtype=dtype)
    prior = Prior(precision=PRECISION, floor=(floor * like)[:, None].expand(K, M), data=DATA * like)
    return Layer.start("layer", prior, noise(K, M, N, seed=5).to(dtype))


def batch(step: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, gradients and noise on the outputs."""
    seeds = (100 + step, 200 + step, 300 + step)
    return (noise(K, rows, N, seed=seeds[0]), noise(K, rows, M, seed=seeds[1]), noise(K, rows, M, seed=seeds[2]))


def product(*parts: Tensor) -> Tensor:
    whole = torch.cat(parts, -1)
    return whole.mT @ whole


def dense(steps: list[tuple[Tensor, Tensor, int]], rates: tuple[float, ...]) -> dict[str, Tensor]:
    """Eqs. 16 to 21 as printed, with explicit inverses, from inputs, targets and rows of each step."""
    psi = {"xx": torch.zeros(K, N, N), "xy": torch.zeros(K, N, M), "yy": torch.zeros(K, M, M)}
    psi = {name: each.double() for name, each in psi.items()}
    rest = 1.0
    for (x, y, rows), rate in zip(steps, rates, strict=True):
        rest *= 1 - rate
        now = {"xx": x.mT @ x, "xy": x.mT @ y, "yy": y.mT @ y}
        psi = {name: (1 - rate) * psi[name] + rate * DATA / rows * now[name] for name in psi}
    eye = torch.eye(N, dtype=torch.float64), torch.eye(M, dtype=torch.float64)
    psi = {name: each / (1 - rest) for name, each in psi.items()}
    r = torch.linalg.inv(PRECISION * eye[0] + psi["xx"])
    mean = r @ psi["xy"]
    u = FLOOR * DATA * eye[1] - mean.mT @ torch.linalg.inv(r) @ mean + psi["yy"]
    return {"r": r, "mean": mean.mT, "sigma": u / (DATA + M + 1)}


def assert_is(own: Layer, truth: dict[str, Tensor], tol: float = 1e-10) -> None:
    torch.testing.assert_close(own.mean, truth["mean"], rtol=tol, atol=tol)
    rows = torch.linalg.inv(own.input_tril @ own.input_tril.mT)
    torch.testing.assert_close(rows, truth["r"], rtol=tol, atol=tol)
    torch.testing.assert_close(own.output_tril @ own.output_tril.mT, truth["sigma"], rtol=tol, atol=tol)


def infer(own: Layer, correction: float) -> None:
    own.infer(correction)
    own.settle()


@pytest.mark.parametrize("form", ["sums", "cases"])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_pseudo_targets_are_those_of_the_paper(noisy: bool, momentum: float, form: str) -> None:
    """Sums of [X G] (or [X E G]) alone give what explicit pseudo-targets give, and so do the cases themselves."""
    own, squares, rest, steps = layer(), torch.zeros(K, M, dtype=torch.float64), 1.0, []
    for step, rate in enumerate(RATES):
        rows = 5 + 3 * step
        x, g, e = batch(step, rows)
        weights = own.mean + 0.1 * noise(K, M, N, seed=step)  # a draw
        rest *= 1 - rate
        squares = (1 - rate) * squares + rate * g.square().mean(1)  # Eq. 19
        change = STEP * g / (squares / (1 - rest)).sqrt()[:, None] + (e if noisy else 0)  # Eqs. 20, 64
        targets = x @ weights.mT + change + momentum * x @ (own.mean - own.before).mT
        steps.append((x, targets, rows))
        gram = product(x, e, g) if noisy else product(x, g)
        went = weights + momentum * (own.mean - own.before)
        own.before.copy_(own.mean)
        if form == "sums":
            own.see_gradients(gram, rows, rate, 1 - rest, weights=went, step_size=STEP)
        else:
            outputs = x @ went.mT + (e if noisy else 0)
            own.see_cases(x, own.pseudo_targets(outputs, g, rate, 1 - rest, STEP), rate)
        infer(own, 1 - rest)
        assert_is(own, dense(steps, RATES[: step + 1]))


def test_true_targets_and_the_conjugate_update() -> None:
    own, (x, y, _) = layer(), batch(0, 20)
    own.see_targets(product(x, y), 20, 1.0)  # β = 1 forgets all else
    infer(own, 1.0)
    for k in range(K):
        prior = MatrixNormalInverseWishart(
            torch.zeros(N, M, dtype=torch.float64),
            row_precision_tril=math.sqrt(PRECISION) * torch.eye(N, dtype=torch.float64),
            scale_tril=math.sqrt(FLOOR * DATA) * torch.eye(M, dtype=torch.float64),
            dof=5.0,
        )
        scale = DATA / 20
        after = prior.updated(scale * x[k].mT @ x[k], scale * x[k].mT @ y[k], scale * y[k].mT @ y[k], DATA)
        torch.testing.assert_close(own.mean[k], after.mean.mT)
        torch.testing.assert_close(own.input_tril[k], after.row_precision_tril)
        # The same U, here with u_0 = 0 and there with 5.
        mode = after.noise.mode * (5 + DATA + M + 1) / (DATA + M + 1)
        torch.testing.assert_close(own.output_tril[k] @ own.output_tril[k].mT, mode)


def test_the_mean_update_of_equation_74_corrected() -> None:
    """M_t = M + β/b R_t (R_0⁻¹ (0 − M) + N/B Xᵀ ΔY), exact also where β changes, with β/b for the printed β."""
    own, rest = layer(), 1.0
    for step, rate in enumerate(RATES):
        x, g, _ = batch(step, 9)
        weights, before = own.mean + 0.1 * noise(K, M, N, seed=step), own.mean.clone()
        rest *= 1 - rate
        own.see_gradients(product(x, g), 9, rate, 1 - rest, weights=weights, step_size=STEP)
        factor = STEP / (own.squares / (1 - rest)).sqrt()
        change = x @ (weights - before).mT + g * factor[:, None]
        infer(own, 1 - rest)
        if step == 0:
            continue  # the first M is no posterior of averages
        r = torch.linalg.inv(own.input_tril @ own.input_tril.mT)
        moved = rate / (1 - rest) * r @ (-PRECISION * before.mT + DATA / 9 * x.mT @ change)
        torch.testing.assert_close(own.mean, before + moved.mT, rtol=1e-12, atol=1e-12)
        printed = before + (moved / rate * (1 - rest) * rate).mT  # β in place of β / b
        assert not torch.allclose(own.mean, printed, rtol=1e-3)


def test_draws_have_the_matrix_normals_covariance() -> None:
    own, (x, y, _) = layer(), batch(0, 20)
    own.see_targets(product(x, y), 20, 1.0)
    infer(own, 1.0)
    unit = noise(30_000, K, M, N, seed=8)
    draws = placed(own.mean, own.input_tril, own.output_tril, unit)[:, 1] - own.mean[1]
    single = own.drawn(unit[0].flatten(), own.output_root())
    torch.testing.assert_close(single, placed(own.mean, own.input_tril, own.output_tril, unit[0]))
    r = torch.linalg.inv(own.input_tril[1] @ own.input_tril[1].mT)
    truth = torch.kron(own.output_tril[1] @ own.output_tril[1].mT, r.contiguous())  # rows of W one after another
    flat = draws.flatten(1)
    error = (truth.square() + truth.diagonal().outer(truth.diagonal())).div(30_000).sqrt()
    assert ((flat.mT @ flat / 30_000 - truth).abs() < 5 * error).all()


def test_a_dead_unit_keeps_its_own_outputs_as_targets() -> None:
    own, (x, g, _) = layer(), batch(0, 10)
    g[..., 0] = 0
    moved = STEP * g / g.square().mean(1, keepdim=True).sqrt().clamp(min=1e-15)
    targets = x @ own.mean.mT + moved
    own.see_gradients(product(x, g), 10, 0.2, 0.2, weights=own.mean.clone(), step_size=STEP)
    infer(own, 0.2)
    assert torch.equal(moved[..., 0], torch.zeros_like(moved[..., 0]))
    assert_is(own, dense([(x, targets, 10)], (0.2,)))


def test_jitter_is_counted_and_trouble_named() -> None:
    own = layer(torch.float32, floor=1e-12)
    x = noise(K, 6, N, seed=1).float()
    y = x[..., :1].expand(-1, -1, M)  # two outputs that are the same, and exactly linear
    before = own.mean.clone()
    own.see_targets(product(x, y), 6, 1.0)
    infer(own, 1.0)
    failed = own.failures > 0
    assert failed.any() and torch.allclose(own.mean[failed], before[failed])  # the last good factor stays
    for _ in range(3):
        infer(own, 1.0)  # with a jitter
    own.check(3)
    torch.testing.assert_close(own.mean, y.new_tensor([1, 0, 0, 0]).expand(K, M, N), atol=0.02, rtol=0)
    sums = own.sums
    own.sums = -torch.eye(N + M).repeat(K, 1, 1) * 100
    for _ in range(4):
        own.check(4)
        infer(own, 1.0)
    assert own.output_root().isnan().all()  # the next loss says so
    with pytest.raises(TrainingError, match="not positive definite by step 5"):
        own.check(5)
    own.sums = sums
    own.see_targets(torch.full((K, N + M, N + M), torch.nan), 6, 1.0)
    infer(own, 1.0)
    assert own.mean.isnan().any()
    with pytest.raises(TrainingError, match="'layer' became NaN or infinite by step 6"):
        own.check(6)

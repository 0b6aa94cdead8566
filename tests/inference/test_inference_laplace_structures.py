"""Laplace's structures against dense precisions written out from their definitions."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from laplace_reference import categorical_hessian, cnn, labels, layers, mlp, normal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dubito
from dubito import EFB, GGN, INF, KFAC, Categorical, DataError, Diagonal, DubitoWarning, Laplace, Training
from dubito.distributions import linalg, sparse_information

pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")

STRUCTURES = [Diagonal(), KFAC(), EFB(), INF(rank=4), INF(rank=4, guard="clamp"), INF(rank=1.0)]
every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=str)
one_of_each = pytest.mark.parametrize("structure", STRUCTURES[:4], ids=str)
NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "linear": (mlp, (30, 4)),
    "convolutions": (cnn, (12, 2, 6, 5)),
}


def fitted(structure, network: nn.Module, inputs: Tensor, **options):
    settings = {"curvature": GGN(), "prior_precision": 0.7, **options}
    method = Laplace(structure=structure, **settings)
    return method.fit(network, (inputs, labels(len(inputs))), Categorical())


# -- precisions, covariances, draws ---------------------------------------------------------------------------------


@every_structure
@pytest.mark.parametrize("name", NETWORKS)
def test_precisions_are_those_of_the_definitions(structure, name: str) -> None:
    make, shape = NETWORKS[name]
    network, inputs = make(), normal(*shape)
    posterior = fitted(structure, network, inputs)
    reference = layers(network, inputs, categorical_hessian)
    assert set(posterior.blocks) == set(reference)
    if structure == INF(rank=1.0):
        structure = INF(rank=10**6)
    for path, layer in reference.items():
        expected = layer.precision(structure, len(inputs), 0.7)
        own = posterior.block(path)
        precision, covariance = own.precision_matrix, own.covariance_matrix
        if isinstance(structure, Diagonal) and len(expected) > 1:
            expected = torch.block_diag(*expected)[None]  # one tall matrix
        assert own.mean.numel() == expected.shape[0] * expected.shape[1]
        precision = precision if precision.ndim == 3 else precision[None]
        torch.testing.assert_close(precision, expected, rtol=1e-9, atol=1e-10)
        covariance = covariance if covariance.ndim == 3 else covariance[None]
        torch.testing.assert_close(covariance, torch.linalg.inv(expected), rtol=1e-8, atol=1e-10)


@one_of_each
def test_draws_have_the_inverse_of_the_dense_precision_as_covariance(structure) -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten())
    network, inputs = network.double(), normal(30, 2)
    posterior = Laplace(structure=structure, prior_precision=2.0).fit(network, (inputs, labels(30, 4)), Categorical())
    count = 2000
    names = [name for block in posterior.blocks.values() for name in block.parameters]
    draws = [posterior.draw(index, posterior.generator(0, index)) for index in range(count)]
    flat = torch.stack([torch.cat([draw[name].flatten() for name in names]) for draw in draws])
    mean = torch.cat([network.get_parameter(name).flatten() for name in names]).detach()
    parts = []
    for block in posterior.blocks.values():
        # From the order of the block's matrices to that of weight and bias one after the other.
        places = torch.arange(block.size).reshape(1, block.rows, block.columns)
        order = torch.cat([part.flatten() for part in block.tensors(places).values()])
        inverse = torch.linalg.inv(posterior.block(block.name).precision_matrix)
        parts.append(inverse[order][:, order])
    root = torch.linalg.cholesky(torch.linalg.inv(torch.block_diag(*parts)))
    white = (flat - mean) @ root  # R Rᵀ = P, so the covariance of Rᵀ (w − w*) is the identity
    assert white.mean(0).abs().max() < 4.5 / count**0.5
    error = white.T @ white / count - torch.eye(len(mean))
    assert error.diagonal().abs().max() < 4.5 * (2 / count) ** 0.5
    assert (error - error.diagonal().diag()).abs().max() < 4.5 / count**0.5


@one_of_each
def test_float32_agrees_with_float64(structure) -> None:
    network, inputs = cnn(), normal(12, 2, 6, 5)
    double, single = (fitted(structure, copy.deepcopy(network).to(t), inputs) for t in (torch.float64, torch.float32))
    for name in double.blocks:
        expected, found = double.block(name).precision_matrix, single.block(name).precision_matrix
        assert (found.double() - expected).norm() / expected.norm() < 1e-5


def test_bfloat16_networks_are_drawn_in_their_own_type() -> None:
    network, inputs = mlp().to(torch.bfloat16), normal(30, 4)
    for structure in (Diagonal(), KFAC()):
        posterior = fitted(structure, network, inputs, curvature=dubito.Fisher())
        weights = posterior.draw(0, posterior.generator(0, 0))
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        assert posterior.block("0").mean.dtype == torch.float32
        plain = [posterior.fold(s)(inputs.to(torch.bfloat16)).float().softmax(-1) for s in range(3)]
        torch.testing.assert_close(
            posterior.predict(inputs, 3, linearised=False).probs, torch.stack(plain).mean(0).detach()
        )


# -- what is kept ---------------------------------------------------------------------------------------------------


def test_each_structure_keeps_what_it_needs_and_no_more() -> None:
    network, inputs = mlp(inputs=5, hidden=7), normal(30, 5)  # 7 x 6 with its bias, and 3 x 7 without
    sizes = {}
    for structure in (Diagonal(), KFAC(), EFB(), INF(rank=4)):
        posterior = fitted(structure, network, inputs)
        sizes[structure.title] = posterior.num_parameters - sum(p.numel() for p in network.parameters())
        kept = {kind: dict(posterior.group(kind).items()) for kind in posterior.tensors}
        assert sizes[structure.title] == sum(t.numel() for group in kept.values() for t in group.values())
    g, a = (kept[kind]["0.weight"].shape[-1] for kind in ("output_vectors", "input_vectors"))
    h, b = (kept[kind]["2.weight"].shape[-1] for kind in ("output_vectors", "input_vectors"))
    assert sizes == {
        "diagonal": 42 + 21,
        "KFAC": 49 + 7 + 36 + 6 + 9 + 3 + 49 + 7,
        "EFB": 49 + 36 + 42 + 9 + 49 + 21,
        "INF": 42 + 7 * g + 6 * a + g * a + 21 + 3 * h + 7 * b + h * b,
    }


def test_the_summary_tells_rank_size_trace_and_negative_corrections() -> None:
    network, inputs = mlp(), normal(30, 4)
    posterior = fitted(INF(rank=4, max_rank=12), network, inputs)
    layer = layers(network, inputs, categorical_hessian)["0"]
    basis = torch.kron(*(torch.linalg.eigh(f[0]).eigenvectors for f in (layer.gradients, layer.inputs)))
    eigenvalues = (basis.mT @ layer.information[0] @ basis).diagonal()
    kept = layer._rectangle(4)
    captured = float(eigenvalues[kept].sum() / eigenvalues.sum())
    low_rank = (basis[:, kept] @ eigenvalues[kept].diag() @ basis[:, kept].mT).diagonal()
    negative = float((layer.information[0].diagonal() < low_rank - 1e-12).double().mean())
    row = next(row for row in posterior.summary().rows if row.name == "0.weight")
    assert row.holds == (f"INF, K 4, L {len(kept)}, {captured:.0%} of the trace, {negative:.0%} of D negative")
    assert posterior.details["facts"]["0"]["captured"] == pytest.approx(captured)
    assert posterior.details["facts"]["0"]["negative"] == pytest.approx(negative)
    assert 0 < negative < 1 and 0 < captured < 1


def test_the_limit_on_the_rectangle_lowers_the_rank() -> None:
    network = mlp()
    free, limited = (fitted(INF(rank=9, max_rank=most), network, normal(30, 4)) for most in (1000, 6))
    assert free.details["facts"]["0"]["size"] > 6 >= limited.details["facts"]["0"]["size"]
    rank = limited.details["facts"]["0"]["rank"]
    assert rank < free.details["facts"]["0"]["rank"] == 9
    assert f"K {rank} of 9, L " in limited.holds("0.weight") and "K 9, L " in free.holds("0.weight")


def test_the_best_rectangle_captures_at_least_as_much() -> None:
    network, inputs = cnn(), normal(12, 2, 6, 5)
    one, best = (fitted(INF(rank=5, selection=own), network, inputs) for own in ("algorithm1", "rectangle"))
    for name in one.blocks:
        first, second = one.details["facts"][name], best.details["facts"][name]
        assert second["size"] <= first["size"] and second["captured"] >= first["captured"] - 1e-12


def test_fractions_of_the_rank() -> None:
    posterior = fitted(INF(rank=0.2), mlp(), normal(30, 4))
    assert [posterior.details["facts"][name]["rank"] for name in ("0", "2")] == [6, 4]  # of 30 and of 18


def test_a_rank_above_the_layers_own_is_reduced_with_a_warning_naming_it() -> None:
    with pytest.warns(DubitoWarning, match=r"rank 20 is more than these layers have.*: 2 to 18;") as caught:
        posterior = fitted(INF(rank=20), mlp(), normal(30, 4))
    assert caught[0].filename == __file__
    assert [posterior.details["facts"]["2"][key] for key in ("rank", "size")] == [18, 18]
    for silent in (INF(), INF(rank=1.0)):
        assert fitted(silent, mlp(), normal(30, 4)).details["facts"]["2"]["rank"] == 18


# -- built once -----------------------------------------------------------------------------------------------------


def test_distributions_are_built_once_and_anew_after_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def counting(*args, **kwargs):
        built.append(args)
        return linalg.cholesky(*args, **kwargs)

    monkeypatch.setattr(sparse_information, "cholesky", counting)
    inputs = normal(30, 4)
    posterior = fitted(INF(rank=4), mlp(), inputs)
    first = posterior.sample_outputs(inputs, 5, seed=1)
    posterior.predict(inputs, 3)
    posterior.predict(inputs, linearised=True)
    assert len(built) == 2  # two layers
    single = posterior.to(torch.float32)
    assert single is posterior
    torch.testing.assert_close(posterior.sample_outputs(inputs, 5, seed=1).shape, first.shape)
    assert len(built) == 4
    assert posterior.block("0").mean.dtype == torch.float32
    posterior.network.double()  # behind the posterior's back
    assert posterior.draw(0, posterior.generator(0, 0))["0.weight"].dtype == torch.float64
    state = {key: value * (not key.startswith("network")) for key, value in posterior.state_dict().items()}
    posterior.load_state_dict(state)
    assert torch.equal(posterior.block("0").mean, torch.zeros(6, 5).double())


def test_a_failing_factorisation_is_told_and_done_in_float64() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    posterior = fitted(INF(rank=6), network, normal(30, 4), prior_precision=1e-5)
    posterior = posterior._with(data_scale=1e7)
    with pytest.warns(DubitoWarning, match=r"Cholesky factorisation cannot be trusted in torch\.float32"):
        weights = posterior.draw(0, posterior.generator(0, 0))
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert posterior.block("0").cholesky.dtype == torch.float64


# -- nothing large --------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor):
                self.numel = max(self.numel, one.numel())
        return out


@one_of_each
def test_no_temporary_is_large(structure, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = 1 << 15
    monkeypatch.setattr("dubito.inference.laplace.covariance.CHUNK", chunk)
    monkeypatch.setattr("dubito.distributions.pair_products.CHUNK", chunk)
    network = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 10))
    inputs = normal(300, 40).float()
    # Drawn labels: INF's rectangle is then larger than the answers of a layer, which bound nothing.
    method = Laplace(structure=structure, curvature=dubito.Fisher())
    posterior = method.fit(network, (inputs, labels(300, 10)), Categorical())
    weights, rank = 60 * 41, posterior.details["facts"]["0"].get("size", 30)
    with Largest() as seen:
        posterior.predict(inputs, 30, linearised=False)
    assert seen.numel < weights * rank and seen.numel < 30 * weights
    with Largest() as seen:
        posterior.predict(inputs, linearised=True)
    assert seen.numel <= max(chunk, 300 * 10 * 60)  # rows × outputs × nodes; never rows × outputs × weights


# -- storage --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the validation rows speak against:dubito.DubitoWarning")
@one_of_each
def test_a_tuned_posterior_comes_back_with_all_it_knows(structure, tmp_path) -> None:
    network, inputs = cnn(), normal(12, 2, 6, 5)
    posterior = fitted(structure, network, inputs).tuned(per_layer=True, validation=(inputs, labels(12)))
    posterior.save(tmp_path / "p.safetensors")
    again = dubito.load(tmp_path / "p.safetensors", network)
    assert again.prior_precision == posterior.prior_precision and again.data_scale == posterior.data_scale
    assert again.log_marginal_likelihood() == posterior.log_marginal_likelihood()
    assert torch.equal(again.sample_outputs(inputs, 3), posterior.sample_outputs(inputs, 3))
    expected = posterior.predict(inputs, linearised=True)
    assert torch.equal(again.predict(inputs, linearised=True).probs, expected.probs)
    assert str(again.summary()) == str(posterior.summary())
    updated = again.update((inputs, labels(12)))
    assert updated.num_data == 24


def test_training_first_covers_the_trained_network() -> None:
    inputs = normal(40, 4)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    training = Training(epochs=3, batch_size=8, lr=1e-2)
    method = Laplace(structure=INF(rank=3), curvature=GGN())
    posterior = method.fit(network, (inputs, labels(40)), Categorical(), training=training)
    trained = copy.deepcopy(posterior.network).requires_grad_(True)
    after = method.fit(trained, (inputs, labels(40)), Categorical())
    plain = torch.cat([p.detach().flatten() for p in trained.parameters()])
    assert posterior.prior_precision == pytest.approx(1 / float(plain.square().mean()))
    assert after.prior_precision == posterior.prior_precision
    for name, block in posterior.blocks.items():  # batch norm's statistics are those after training
        for kind, tensor in after.block_tensors(block).items():
            torch.testing.assert_close(posterior.block_tensors(block)[kind], tensor)
        assert name in after.blocks


def test_unusable_statistics_are_refused() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(DataError):
        fitted(KFAC(), network, normal(30, 4) * 1e30)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """While open, PyTorch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("structure", [KFAC(), EFB(), INF(rank=12)], ids=lambda structure: structure.title)
def test_draws_do_not_depend_on_threads_or_on_the_order_of_rows(structure):
    """Factors of deficient rank: 30 rows, of which 4 inputs are always 0, for layers of 24 and 32 inputs."""
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(30, 24, generator=stream) * (torch.arange(24) >= 4)
    y = torch.randint(3, (30,), generator=stream)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    method = Laplace(structure=structure, curvature=GGN(), linearised=False)
    order = torch.randperm(30, generator=stream)
    draws = []
    for count, rows in ((1, slice(None)), (2, slice(None)), (1, order)):
        with threads(count):
            posterior = method.fit(network, (x[rows], y[rows]), Categorical())
            tensors = posterior.draw(0, posterior.generator(0, 0)).values()
            draws.append(torch.cat([tensor.flatten() for tensor in tensors]))
    # Sums round by about 1e-7, and eigenvectors turn by that over the distance of their eigenvalues, here at least
    # 1e-4 of the largest outside the null space: some 1e-3 of a draw; other signs or bases change it by 0.5.
    for other in draws[1:]:
        assert (draws[0] - other).abs().max() < 5e-3
    assert draws[0].sub(torch.cat([p.flatten() for p in network.parameters()])).std() > 0.05

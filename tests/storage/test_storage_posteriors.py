"""Posteriors in files: the same samples when they come back, and no other network takes them."""

import copy
import json
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import dubito
from dubito import (
    MAP,
    Bernoulli,
    Categorical,
    ConfigError,
    DubitoWarning,
    Gaussian,
    Laplace,
    MeanField,
    NetworkError,
    StorageError,
    Training,
    storage,
)

QUICK = Training(epochs=1, batch_size=8, lr=1e-2)


class Net(nn.Module):
    """Tied weights, batch norm, a scalar, an unstored buffer, and a frozen layer."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.again = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.again.weight
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(5, outputs)
        self.register_buffer("table", torch.linspace(-1, 1, 5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.first(x))) + self.table
        h = self.frozen(self.tied(torch.tanh(self.again(h))))
        return self.head(h * self.gain)


def made(outputs: int = 3, seed: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(outputs)


X = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(20) % 3
REALS = torch.randn(20, 3, generator=torch.Generator().manual_seed(2))


def fitted(method=None, likelihood=None, targets: Tensor = LABELS):
    method = method or MeanField(initial_std=0.3)
    return method.fit(made(), (X, targets), likelihood or Categorical(), training=QUICK)


@pytest.fixture
def path(tmp_path):
    target = tmp_path / "p.safetensors"
    fitted().save(target)
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_round_trip_gives_the_same_samples(tmp_path, dtype: torch.dtype):
    posterior = fitted().to(dtype)
    posterior.save(tmp_path / "p")
    net = made(seed=5)
    state = copy.deepcopy(net.state_dict())
    again = dubito.load(tmp_path / "p", net)
    assert type(again) is type(posterior) and again.method == posterior.method
    expected = posterior.sample_outputs(X, 4, seed=3)
    assert expected.dtype == dtype
    assert torch.equal(again.sample_outputs(X, 4, seed=3), expected)
    assert torch.equal(again.predict(X, seed=1).log_prob(LABELS), posterior.predict(X, seed=1).log_prob(LABELS))
    assert again.network.tied.weight is again.network.again.weight
    assert again.network.table.dtype == dtype  # also what is not stored follows
    assert again.history == posterior.history and again.details == posterior.details
    assert (again.num_parameters, again.nbytes) == (posterior.num_parameters, posterior.nbytes)
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
    assert net.first.weight.dtype == torch.float32 and net.training
    folded = again.fold(1)
    assert [p.requires_grad for p in folded.parameters()] == [p.requires_grad for p in net.parameters()]


def test_the_fitted_and_the_loaded_posterior_move_alike(tmp_path):
    posterior = fitted()
    posterior.save(tmp_path / "p")
    again = dubito.load(tmp_path / "p", made())
    assert torch.equal(again.double().sample_outputs(X, 2), posterior.double().sample_outputs(X, 2))
    into_double = dubito.load(tmp_path / "p", made().double())
    assert into_double.sample_outputs(X, 2).dtype == torch.float32  # the file's precision, not the network's


def test_saving_what_was_loaded_gives_the_same_file(path, tmp_path):
    dubito.load(path, made()).save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        (Categorical(), LABELS),
        (Bernoulli(), (REALS > 0).long()),
        (Gaussian(), REALS),
        (Gaussian(std=0.3), REALS),
        (Gaussian(std=(0.1, 0.2, 3.0)), REALS),
        (Gaussian(covariance=((2.0, 0.5, 0.0), (0.5, 1.0, 0.0), (0.0, 0.0, 1.0))), REALS),
    ],
    ids=repr,
)
def test_every_likelihood_comes_back(tmp_path, likelihood, targets: Tensor):
    posterior = fitted(likelihood=likelihood, targets=targets)
    posterior.save(tmp_path / "p")
    again = dubito.load(tmp_path / "p", made())
    assert again.likelihood.settings == likelihood
    assert torch.equal(again.predict(X, 5).log_prob(targets), posterior.predict(X, 5).log_prob(targets))
    for name, tensor in posterior.likelihood.state_dict().items():
        assert torch.equal(again.likelihood.state_dict()[name], tensor)
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_noise_of_components_comes_back(tmp_path):
    posterior = fitted(likelihood=Gaussian(), targets=REALS)
    for noise in ({"std": torch.rand(4, 3) + 0.1}, {"covariance": torch.eye(3).expand(2, 3, 3) * 2}):
        posterior.likelihood = posterior.likelihood.with_noise(**noise)
        posterior.save(tmp_path / "p")
        again = dubito.load(tmp_path / "p", made())
        assert again.likelihood.num_components == posterior.likelihood.num_components > 1
        assert torch.equal(again.predict(X, 8).log_prob(REALS), posterior.predict(X, 8).log_prob(REALS))


def test_the_file_tells_what_it_holds(path):
    with safe_open(path, framework="pt") as file:
        names, header = set(file.keys()), json.loads(file.metadata()["dubito"])
    content = header["content"]
    assert content["method"] == {
        "type": "MeanField",
        "prior_std": 1.0,
        "initial_std": 0.3,
        "initial_spread": 0.0,
        "max_std": None,
        "estimator": {"type": "Reparameterised"},
        "subset": None,
    }
    assert content["likelihood"] == {
        "type": "Categorical",
        "class_axis": 1,
        "class_weights": None,
        "ignore_index": None,
        "shift": False,
    }
    own = {f"network.{name}" for name in dict(made().named_parameters())}
    assert own <= names and "network.tied.weight" not in names  # tied tensors are stored once
    assert {"network.norm.running_mean", "network.norm.num_batches_tracked"} <= names
    assert "network.table" not in names
    assert {f"raw_std.{name}" for name in content["structure"]["raw_std"]} <= names
    assert set(header["shapes"]) == names


@pytest.mark.filterwarnings("ignore:the network is no better than a constant")  # it was not trained
def test_predicates_become_names(tmp_path):
    def weights_only(name: str, tensor: Tensor) -> bool:
        return tensor.ndim > 1

    picked = ("first.weight", "again.weight", "head.weight")
    for method in (MeanField(subset=weights_only), Laplace(subset=weights_only)):
        posterior = fitted(method)
        assert posterior.method.subset == picked
        posterior.save(tmp_path / "p")
        assert dubito.load(tmp_path / "p", made()).method.subset == picked
        assert method.subset is weights_only  # the settings themselves stay


def other_width() -> nn.Module:
    net = made()
    net.again = nn.Linear(5, 6)
    net.head = nn.Linear(7, 3)
    return net


def without_tie() -> nn.Module:
    net = made()
    net.tied.weight = nn.Parameter(net.again.weight.detach().clone())
    return net


def without_frozen() -> nn.Module:
    net = made()
    net.frozen = nn.Identity()
    return net


def with_more() -> nn.Module:
    net = made()
    net.more = nn.Linear(1, 1)
    return net


def without_statistics() -> nn.Module:
    net = made()
    net.norm = nn.BatchNorm1d(5, track_running_stats=False)
    return net


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: made(outputs=4), r"'head\.weight' has shape \(3, 5\) in the file and \(4, 5\) in the network"),
        (other_width, r"'again\.weight' has shape \(5, 5\) in the file and \(6, 5\) in the network"),
        (without_tie, r"the network has 'tied\.weight', the file has not"),
        (without_frozen, r"the file has 'frozen\.(weight|bias)', the network has not"),
        (with_more, r"the network has 'more\.weight', the file has not"),
        (without_statistics, r"the file has 'norm\.\w+', the network has not"),
    ],
)
def test_another_architecture_is_refused_by_its_first_difference(path, change, message: str):
    net = change()
    with pytest.raises(StorageError, match=f"another architecture: .*{message}"):
        dubito.load(path, net)


def test_what_is_no_network_is_refused(path):
    with pytest.raises(NetworkError, match="must have parameters"):
        dubito.load(path, nn.ReLU())
    with pytest.raises(NetworkError, match=r"must be an nn\.Module"):
        dubito.load(path, None)  # pyright: ignore


def forged(path, change) -> None:
    """The file with its content and tensors changed, and every checksum made to fit."""
    tensors, content = storage.read(path, "posterior")
    change(tensors, content)
    storage.write(path, "posterior", tensors, content)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, content: content.pop("method"),
        lambda tensors, content: content.pop("structure"),
        lambda tensors, content: content["method"].update(type="os.system"),
        lambda tensors, content: content.update(method={"type": "He", "gain": 1.0}),
        lambda tensors, content: content.update(method={"type": "Categorical", "class_axis": 1}),
        lambda tensors, content: content.update(likelihood={"type": "MAP", "prior_std": None}),
        lambda tensors, content: content.update(likelihood="Categorical"),
        lambda tensors, content: content["method"].update(initial_std=-1),
        lambda tensors, content: tensors.pop("raw_std.first.weight"),
        lambda tensors, content: tensors.pop("network.first.weight"),
    ],
)
def test_forged_files_are_refused(path, change):
    forged(path, change)
    with pytest.raises(StorageError):
        dubito.load(path, made())


def test_no_pickle_is_written_or_read(tmp_path, monkeypatch):
    posterior = fitted()

    def refuse(*args, **kwargs):
        pytest.fail("pickle was used")

    for module, names in (
        (pickle, ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")),
        (torch, ("save", "load")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    posterior.save(tmp_path / "p")
    again = dubito.load(tmp_path / "p", made())
    assert torch.equal(again.sample_outputs(X, 2), posterior.sample_outputs(X, 2))


def test_a_posterior_does_not_follow_its_file(path):
    again = dubito.load(path, made())
    before = again.sample_outputs(X, 2)
    with open(path, "r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(again.sample_outputs(X, 2), before)


def test_a_checkpoint_is_no_posterior(tmp_path):
    storage.write(tmp_path / "c", "checkpoint", {}, {})
    with pytest.raises(StorageError, match="holds a checkpoint, expected a posterior"):
        dubito.load(tmp_path / "c", made())
    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(StorageError, match="not written by dubito"):
        dubito.load(tmp_path / "other", made())


def test_settings_that_cannot_be_stored_are_found_before_writing(tmp_path):
    posterior = fitted()
    posterior.method = MeanField(subset=lambda name, tensor: True)
    with pytest.raises(StorageError, match="cannot store a setting"):
        posterior.save(tmp_path / "p")
    assert not any(tmp_path.iterdir())


def test_unknown_methods_list_the_known():
    with pytest.raises(ConfigError, match=r"unknown method 'mean-feild', did you mean 'mean-field'\? Known: .*map"):
        dubito.methods()["mean-feild"]
    assert dubito.methods()["map"] == MAP()


class Gain(nn.Module):
    """A layer that keeps a number beside its tensors."""

    def __init__(self, gain):
        super().__init__()
        self.gain, self.layer = gain, nn.Linear(3, 2)

    def forward(self, inputs):
        return self.layer(inputs) * float(self.gain)

    def get_extra_state(self):
        return {"gain": self.gain} if isinstance(self.gain, float) else self.gain

    def set_extra_state(self, state):
        self.gain = state["gain"]


def test_what_modules_keep_beside_tensors_comes_back(tmp_path):
    inputs, targets = torch.randn(20, 3), torch.arange(20) % 2
    posterior = MAP().fit(nn.Sequential(Gain(2.0)), (inputs, targets), Categorical(), training=QUICK)
    posterior.save(tmp_path / "one.safetensors")
    again = dubito.load(tmp_path / "one.safetensors", nn.Sequential(Gain(1.0)))
    torch.testing.assert_close(again.predict(inputs).probs, posterior.predict(inputs).probs, rtol=0, atol=0)
    with pytest.raises(StorageError, match="of another architecture"):
        dubito.load(tmp_path / "one.safetensors", nn.Sequential(nn.Linear(3, 2)))
    posterior.network[0].gain = torch.tensor(2.0)
    with pytest.warns(DubitoWarning, match=r"not stored: the extra state of 0 \(Tensor\)"):
        posterior.save(tmp_path / "one.safetensors")
    assert dubito.load(tmp_path / "one.safetensors", nn.Sequential(Gain(2.0))).network[0].gain == 2.0
    with pytest.raises(StorageError, match="of another network"):
        dubito.load(tmp_path / "one.safetensors", nn.Sequential(Gain(3.0)))
    other = dubito.load(tmp_path / "one.safetensors", nn.Sequential(Gain(3.0)), fingerprint=False)
    assert other.network[0].gain == 3.0

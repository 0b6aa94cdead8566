"""Adapters on a frozen base: its memory is shared, files hold none of it and know it by checksums."""

import copy
import json
from functools import cache
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dubito
from dubito import EFB, INF, MAP, SWAG, Categorical, DeepEnsemble, KTied, Laplace, MCDropout, MeanField, Training
from dubito.errors import StorageError
from dubito.networks import renewed

QUICK = Training(iterations=12, batch_size=8, lr=3e-3)
METHODS = {
    "map": MAP(),
    "mc-dropout": MCDropout(),
    "deep-ensemble": DeepEnsemble(members=3),
    "k-tied": KTied(),
    "mean-field": MeanField(),
    "swag": SWAG(),
    "rank1": dubito.Rank1(),
    "batch-ensemble": dubito.BatchEnsemble(),
    "implicit": dubito.Implicit(),
    "laplace-kfac": Laplace(),
    "laplace-efb": Laplace(structure=EFB()),
    "laplace-inf": Laplace(structure=INF(rank=0.1)),
    "vogn": dubito.VOGN(),
    "bali": dubito.BALI(),
}


class Adapted(nn.Module):
    """A frozen layer and its adapter: W x + B A x."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.lora_B(self.lora_A(inputs))


def adapted(width: int = 64, rank: int = 4, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(Adapted(width, rank), nn.Tanh(), Adapted(width, rank), nn.Linear(width, 3))


def frozen(net: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in net.named_parameters() if not p.requires_grad}


def rows(width: int = 64) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, width, generator=stream)
    return inputs, inputs[:, :3].argmax(1)


class Copies(TorchDispatchMode):
    """The largest tensor that is made while open, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.memory = 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor) and not t.is_meta}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta and result.untyped_storage().data_ptr() not in taken:
            self.largest = max(self.largest, result.numel())
        return result


@cache
def fitted(name: str) -> tuple[nn.Module, Any, int]:
    """The user's network, the posterior, and the largest tensor that the fit and a prediction made."""
    net, copies = adapted(), Copies()
    with copies:
        posterior = METHODS[name].fit(net, rows(), Categorical(), training=QUICK, progress=False)
        posterior.predict(rows()[0][:5], num_samples=2)
    return net, posterior, copies.largest


def same_memory(posterior: Any, net: nn.Module) -> bool:
    weights = posterior.weights()
    return all(weights[name].data_ptr() == tensor.data_ptr() for name, tensor in frozen(net).items())


@pytest.mark.parametrize("name", METHODS)
def test_posteriors_share_the_base_and_files_hold_none_of_it(name: str, tmp_path):
    net, posterior, _ = fitted(name)
    assert same_memory(posterior, net)
    drawn = posterior.draw(1, posterior.generator(0, 1))
    assert all(drawn[key].data_ptr() == tensor.data_ptr() for key, tensor in frozen(net).items())
    path = tmp_path / "p.safetensors"
    posterior.save(path)
    with safe_open(path, "pt") as file:
        names = set(file.keys())
    assert not {f"network.{key}" for key in frozen(net)} & names
    assert {f"network.{key}" for key, p in net.named_parameters() if p.requires_grad} <= names
    other: Any = adapted()
    loaded: Any = dubito.load(path, other.requires_grad_(False))  # as networks for inference come
    assert same_memory(loaded, adapted()) is False and loaded.trainable == posterior.trainable
    weights = loaded.weights()
    assert all(weights[key].data_ptr() == other.get_parameter(key).data_ptr() for key in frozen(net))
    inputs = rows()[0]
    expected = posterior.predict(inputs, num_samples=4).probs
    assert torch.equal(loaded.predict(inputs, num_samples=4).probs, expected)
    loaded.save(tmp_path / "again.safetensors")
    assert dubito.load(tmp_path / "again.safetensors", adapted()).num_parameters == posterior.num_parameters


@pytest.mark.parametrize("name", ["map", "deep-ensemble", "k-tied", "mean-field", "rank1", "implicit", "mc-dropout"])
def test_nothing_as_large_as_a_frozen_layer_is_made(name: str):
    assert fitted(name)[2] < 64 * 64


def test_copies_of_posteriors_share_it_too(tmp_path):
    net, laplace, _ = fitted("laplace-kfac")
    more = laplace.update(rows())
    others = [laplace.tuned(), more, laplace.scaled(0.5), laplace.sampled(2, linearised=False)]
    others += [fitted("mean-field")[1].scaled(2.0)] if same_memory(fitted("mean-field")[1], net) else []
    assert all(same_memory(other, net) for other in others)
    more.save(tmp_path / "p.safetensors")
    assert dubito.load(tmp_path / "p.safetensors", net).num_data == 48
    doubled = copy.deepcopy(laplace).double()
    assert not same_memory(doubled, net) and same_memory(laplace, net)
    doubled.save(tmp_path / "d.safetensors")
    assert dubito.load(tmp_path / "d.safetensors", net).weights()["0.base.weight"].dtype == torch.float64


def test_a_folded_network_is_the_callers_own():
    net, posterior, _ = fitted("k-tied")
    before = {name: tensor.clone() for name, tensor in frozen(net).items()}
    folded: Any = posterior.fold(0)
    with torch.no_grad():
        for parameter in folded.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen(net).items())
    assert {name for name, p in folded.named_parameters() if p.requires_grad} == posterior.trainable


def test_members_drawn_anew_leave_the_base_alone():
    net: Any = adapted()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    posterior: Any = DeepEnsemble(members=2).fit(
        net, rows(), Categorical(), training=QUICK, start=lambda: adapted(seed=5), progress=False
    )
    assert same_memory(posterior, net)  # the factory's base is not used
    member: Any = renewed(net)
    assert not torch.equal(member[0].lora_A.weight, net[0].lora_A.weight)
    assert torch.equal(member[0].base.weight, net[0].base.weight)
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
    nets: Any = [adapted(), adapted()]
    joined = DeepEnsemble.from_networks(nets, Categorical())
    assert joined.weights()["0.base.weight"].data_ptr() == nets[0][0].base.weight.data_ptr()


def test_another_base_is_refused_and_the_difference_named(tmp_path):
    _, posterior, _ = fitted("map")
    path = tmp_path / "p.safetensors"
    posterior.save(path)
    net: Any = adapted()
    with torch.no_grad():
        net[2].base.bias[3] += 1e-6
    with pytest.raises(StorageError, match=r"another base.* 1 differ, such as '2.base.bias'.*pretrained"):
        dubito.load(path, net)
    half: Any = adapted()
    half[0].base.to(torch.bfloat16)
    with pytest.raises(StorageError, match=r"2 differ, such as '0.base.weight', bfloat16"):
        dubito.load(path, half)
    with pytest.raises(StorageError, match=r"4 frozen parameters in the file.* 6 in the network"):
        dubito.load(path, nn.Sequential(*adapted(), nn.Linear(3, 3)))


def test_a_base_changed_in_place_is_another(tmp_path):
    net: Any = adapted()
    posterior: Any = MAP().fit(net, rows(), Categorical(), training=QUICK, progress=False)
    posterior.save(tmp_path / "p.safetensors")
    with torch.no_grad():
        net[0].base.weight.mul_(2.0)
    with pytest.raises(StorageError, match="another base"):
        dubito.load(tmp_path / "p.safetensors", net)
    assert torch.equal(posterior.weights()["0.base.weight"], net[0].base.weight)


@pytest.mark.parametrize("method", [MAP(), KTied(), MeanField(), dubito.Rank1()], ids=lambda m: type(m).__name__)
def test_a_file_is_as_large_as_its_adapters_and_their_distribution(method: Any, tmp_path):
    net: Any = adapted(width=1024, rank=64)
    posterior: Any = method.fit(net, rows(1024), Categorical(), training=QUICK, progress=False)
    posterior.save(tmp_path / "p.safetensors")
    numbers = sum(row.num_parameters for row in posterior.summary().rows if row.name in posterior.trainable)
    assert (tmp_path / "p.safetensors").stat().st_size <= 1.05 * 4 * numbers


def test_few_frozen_parameters_are_copied_and_stored(tmp_path):
    net: Any = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 3))
    net[2].requires_grad_(False)
    posterior: Any = MAP().fit(net, rows(), Categorical(), training=QUICK, progress=False)
    assert posterior.weights()["2.weight"].data_ptr() != net[2].weight.data_ptr()
    posterior.save(tmp_path / "p.safetensors")
    with safe_open(tmp_path / "p.safetensors", "pt") as file:
        assert "network.2.weight" in file.keys()  # noqa: SIM118
        assert "base" not in json.loads(file.metadata()["dubito"])["content"]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft's of Transformers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_of_peft_are_adapted_networks(dtype: torch.dtype, tmp_path):
    import peft
    import transformers as library

    transformers: Any = library

    def made() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = transformers.LlamaConfig(
                vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_labels=2, pad_token_id=0,
            )  # fmt: skip
            base = transformers.LlamaForSequenceClassification(config).to(dtype)
            adapters = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "v_proj"])
            return peft.get_peft_model(base, adapters)

    stream = torch.Generator().manual_seed(0)
    words = torch.randint(1, 32, (16, 6), generator=stream)
    data = words, (words[:, -1] > 16).long()
    net: Any = made()
    for method in (KTied(), dubito.Rank1(), DeepEnsemble(members=2)):
        posterior: Any = method.fit(net, data, Categorical(), training=QUICK, progress=False)
        posterior.save(tmp_path / "p.safetensors")
        loaded: Any = dubito.load(tmp_path / "p.safetensors", made())
        expected = posterior.predict(data[0], num_samples=2).probs
        assert torch.equal(loaded.predict(data[0], num_samples=2).probs, expected)
        assert same_memory(posterior, net)

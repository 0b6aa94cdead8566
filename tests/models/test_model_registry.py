"""Every network by name: shapes, seeds, global randomness, gradients."""

import inspect
import json

import pytest
import torch
from torch import Tensor, nn

from dubito import models
from dubito.errors import ConfigError, UnknownNameError

SMALL = {
    "clinical_lstm": {"num_features": 3, "hidden": 4},
    "densenet121": {},
    "densenet161": {},
    "imdb_lstm": {"vocabulary": 20, "embedding": 3, "hidden": 4},
    "lenet": {"in_channels": 3, "image_size": 32, "channels": [4, 6], "dense": [8]},
    "mlp": {"in_features": 3072, "hidden": [8, 8]},
    "resnet18": {"base": 4},
    "resnet50": {"base": 4, "small_images": True},
    "resnet152": {"base": 4},
    "tfp_resnet18": {},
    "vgg": {"stages": [[4], [6, 6]], "dense": [5], "batch_norm": True},
    "vgg16": {},
    "wide_resnet": {"depth": 10, "width": 1, "base": 4},
}


def inputs_of(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    if name == "imdb_lstm":
        return torch.randint(20, (4, 6), generator=generator)
    shape = (4, 6, 3) if name == "clinical_lstm" else (4, 3, 32, 32)
    return torch.randn(shape, generator=generator)


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def test_names_are_the_networks_of_the_room() -> None:
    assert models.names() == sorted(SMALL)
    assert all(callable(getattr(models, name)) for name in models.names())


@pytest.mark.parametrize("name", sorted(SMALL))
def test_outputs_and_gradients(name: str) -> None:
    network = models.make(name, num_classes=7, **SMALL[name])
    logits = network(inputs_of(name))
    assert logits.shape == (4, 7)
    logits.square().sum().backward()
    for parameter_name, parameter in network.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        if parameter.ndim > 1:  # a bias before batch norm has none
            assert parameter.grad.any(), parameter_name


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_stored_name_and_arguments_give_the_same_network(name: str) -> None:
    stored = json.dumps({"name": name, **SMALL[name], "num_classes": 3, "seed": 11})
    before = torch.get_rng_state()
    first = models.make(**json.loads(stored))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)  # another global state must not matter
    assert same(first, getattr(models, name)(**SMALL[name], num_classes=3, seed=11))
    if name not in ("densenet161", "vgg16"):  # large; their siblings stand for them
        assert not same(first, models.make(name, **SMALL[name], num_classes=3, seed=12))


def test_one_class_gives_one_logit_with_its_axis() -> None:
    network = models.clinical_lstm(3)
    assert network(inputs_of("clinical_lstm")).shape == (4, 1)
    assert models.imdb_lstm(vocabulary=20)(inputs_of("imdb_lstm")).shape == (4, 1)


def test_every_network_takes_num_classes_and_seed_by_keyword() -> None:
    for name in models.names():
        parameters = inspect.signature(getattr(models, name)).parameters
        for keyword in ("num_classes", "seed"):
            assert parameters[keyword].kind is inspect.Parameter.KEYWORD_ONLY, name


def test_unknown_network_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown network 'resnet5', did you mean 'resnet50'"):
        models.make("resnet5")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"depth": 28}, "missing a required argument: 'width'"), ({"deep": 28}, "depth: int, width: int")],
)
def test_wrong_arguments_are_explained(arguments: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        models.make("wide_resnet", **arguments)


def test_networks_follow_the_default_device_and_type() -> None:
    with torch.device("meta"):
        assert all(p.device.type == "meta" for p in models.resnet152().parameters())
    torch.set_default_dtype(torch.float64)
    try:
        assert all(p.dtype == torch.float64 for p in models.clinical_lstm(3).parameters())
    finally:
        torch.set_default_dtype(torch.float32)

"""The check that people run on devices of theirs: right here, and wrong where something is."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dubito
from dubito import ConfigError
from dubito import selfcheck as module
from dubito.cli import main
from dubito.posterior import Posterior
from dubito.selfcheck import CHECKS, selfcheck, usable
from tests.device.simulated import CUDA, simulated

METHODS = ("map", "mean-field", "laplace-kfac")


def results(device: torch.device, *names: str) -> dict[tuple[str, str], Any]:
    methods = {name: dubito.methods()[name] for name in names}
    return {(result.method, result.check): result for result in selfcheck(device, methods)}


def test_the_command_tells_what_held_where(capsys):
    arguments = ["selfcheck", "--device", "cpu", "--methods", ",".join(METHODS)]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["torch"] == torch.__version__ and told["device"] == "cpu" and told["dtype"] == "float32"
    assert {(check["method"], check["passed"]) for check in told["checks"]} == {(name, True) for name in METHODS}
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "linearised as on the CPU" in table and table.endswith("12 of 12 checks are right\n")


def test_a_device_that_is_not_here_is_refused(capsys):
    with pytest.raises(ConfigError, match="device must be one that PyTorch finds here, got 'abacus'"):
        usable("abacus")
    if not torch.cuda.is_available():
        assert main(["selfcheck", "--device", "cuda"]) == 1
        assert "got 'cuda'" in capsys.readouterr().err


def test_all_methods_work_on_a_made_up_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    with simulated() as reads:
        held = results(CUDA, *dubito.methods())
    assert [result for result in held.values() if not result.passed] == []
    assert {check for _, check in held} == set(CHECKS)
    # The network that stands for the CPU's lies on the made-up device as well; what the library does is right there.
    assert not [read for read in reads if "two devices" in read and not read.startswith("/selfcheck.py")]


def moved_weights(posterior: Posterior) -> Posterior:
    next(posterior.network.parameters()).data.add_(0.5)
    return posterior


def wide_draws(posterior: Posterior) -> Posterior:
    for raw_std in posterior.group("raw_std").parameters() if "raw_std" in posterior.tensors else ():
        raw_std.data.add_(1.0)
    return posterior


def shifted_curvature(posterior: Posterior) -> Posterior:
    posterior.details["prior_precision"] = posterior.details["prior_precision"] * 100
    return posterior


@pytest.mark.parametrize(
    "method, check, name, spoil",
    [
        ("map", "centre as on the CPU", "duplicate", moved_weights),
        ("mean-field", "draws as on the CPU", "duplicate", wide_draws),
        ("laplace-kfac", "linearised as on the CPU", "duplicate", shifted_curvature),
        ("mean-field", "same seed, saved and loaded", "load", moved_weights),
    ],
)
def test_what_is_wrong_is_named(method: str, check: str, name: str, spoil: Callable[..., Any], monkeypatch, capsys):
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: spoil(right(*args)))
    result = results(torch.device("cpu"), method)[method, check]
    assert not result.passed and "is right" in result.detail
    assert main(["selfcheck", "--device", "cpu", "--methods", method]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_an_error_is_a_result(monkeypatch):
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no kernel\nfor this device")

    monkeypatch.setattr(dubito.MAP, "fit", failing)
    result = results(torch.device("cpu"), "map")["map", "fit"]
    assert not result.passed and result.detail == "NotImplementedError: no kernel for this device"

"""Translations from other libraries: our half of the page gives what theirs gave, or differs as the page says."""

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dubito import KFAC, Gaussian, Laplace
from tests.docs.pages import BLOCK

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "coming-from.md"


@cache
def stored() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text())


def real(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def problem() -> dict[str, Any]:
    """The names that the page takes as given."""
    given = stored()["problem"]
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    net.load_state_dict({name: real(values) for name, values in given["weights"].items()})
    last = nn.Linear(1, 2, bias=False).double()
    last.weight.data = real([[-8.0], [8.0]])
    x, y = real(given["x"]), real(given["y"])
    classes = {"classifier": nn.Sequential(net, last), "labels": (y[:, 0] > 0.5).long()}
    return {"net": net, "x": x, "y": y, "x_new": real(given["places"]), **classes}


@cache
def page() -> list[dict[str, Any]]:
    """What the page's blocks leave behind, one after the other."""
    space, spaces = problem(), []
    for block in BLOCK.finditer(PAGE.read_text()):
        exec(compile(block["code"], str(PAGE), "exec"), space)
        spaces.append(dict(space))
    return spaces


def test_laplace_with_a_diagonal_is_laplace_torchs():
    theirs, ours = stored()["laplace-torch"]["diag"], page()[0]
    torch.testing.assert_close(ours["mean"][:, 0], real(theirs["mean"]))
    torch.testing.assert_close(ours["variance"][:, 0], real(theirs["variance"]), rtol=1e-9, atol=0)
    assert ours["evidence"] == pytest.approx(theirs["log_marginal_likelihood"], rel=1e-9)


def test_kfac_differs_from_laplace_torchs_as_the_page_says():
    given, theirs = problem(), stored()["laplace-torch"]["kron"]
    method = Laplace(structure=KFAC(), prior_precision=2.0)
    posterior = method.fit(given["net"], (given["x"], given["y"]), Gaussian(std=0.1))
    ratios = posterior.predict(given["x_new"]).epistemic[:, 0] / real(theirs["variance"])
    assert ratios[:2].tolist() == pytest.approx([1, 1], abs=0.05)
    assert ratios[2:].tolist() == pytest.approx([1.73, 4.64, 1.01], abs=0.01)
    evidences = posterior.log_marginal_likelihood(), theirs["log_marginal_likelihood"]
    shown = re.search(r"evidence is −([\d.]+) here and −([\d.]+) there", PAGE.read_text())
    assert shown and evidences == pytest.approx([-float(number) for number in shown.groups()], abs=0.05)


def test_mean_field_is_bayesian_torchs_but_for_its_divergence():
    theirs, ours = stored()["bayesian-torch"], page()[1]
    # Standard errors of 4,000 draws on both sides: std · √(2 / 4000) of the mean, std / √4000 of the deviation.
    std = real(theirs["output_std"])
    outputs = ours["outputs"][..., 0]
    assert ((outputs.mean(0) - real(theirs["mean"])).abs() < 4 * std * (2 / 4000) ** 0.5).all()
    torch.testing.assert_close(outputs.std(0), std, rtol=0.08, atol=0)
    built = ours["built"]
    means = [
        (-math.log(theirs["std"]) + 0.5 * (theirs["std"] ** 2 + weight.detach().square()) - 0.5).mean().item()
        for weight in built.draft.weights().values()
    ]
    assert sum(means) == pytest.approx(theirs["kl"], rel=1e-5)
    shown = re.search(r"elements, ([\d.]+) on .* sum, ([\d.]+) nats", PAGE.read_text())
    assert shown and float(shown[1]) == pytest.approx(theirs["kl"], abs=0.05)
    assert float(shown[2]) == pytest.approx(built.kl().item(), abs=0.05)


def test_torch_uncertaintys_layers_and_temperature_are_ours_but_for_its_divergence():
    theirs, ours = stored()["torch-uncertainty"], page()[2]
    std, outputs = real(theirs["output_std"]), ours["outputs"][..., 0]
    assert ((outputs.mean(0) - real(theirs["mean"])).abs() < 4 * std * (2 / 4000) ** 0.5).all()
    torch.testing.assert_close(outputs.std(0), std, rtol=0.08, atol=0)
    assert ours["temperature"] == pytest.approx(theirs["temperature"], rel=1e-3)
    weights = sum(weight.numel() for weight in ours["built"].draft.weights().values())
    kl = ours["kl"].item()
    assert abs((kl - weights / 2) / 2 - theirs["kl"]) < 4 * theirs["kl_error"]  # two layers
    shown = re.search(r"number of layers\*: ([\d.]+) on .* divergence is ([\d.]+) nats", PAGE.read_text())
    assert shown and [float(number) for number in shown.groups()] == pytest.approx([theirs["kl"], kl], abs=0.05)


def test_an_ensemble_is_uncertain_away_from_the_data_and_versions_are_named():
    epistemic = page()[3]["epistemic"][:, 0]
    assert epistemic[:2].max() < epistemic[3:].min()
    for name, version in stored()["versions"].items():
        assert name == "torch" or f"version {version}" in PAGE.read_text()

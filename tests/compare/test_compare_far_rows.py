"""Rows far from the data: what mutual information misses and the variance of logits finds, by real fits."""

import numpy as np
import pytest
import torch
from sklearn import datasets
from torch import nn

from dubito import KFAC, MAP, SWAG, Categorical, DeepEnsemble, Laplace, MeanField, Rank1, Training
from dubito.compare import Settings, compare
from dubito.compare.evidence import unlike, usual_epistemic
from dubito.compare.folder import Folder
from dubito.compare.predict import predict
from dubito.compare.task import make_task
from dubito.shifts import detection

METHODS = {
    "mean field": MeanField(),
    "rank-1": Rank1(),
    "deep ensemble": DeepEnsemble(members=4),
    "laplace": Laplace(structure=KFAC(), linearised=True),
    "swag": SWAG(),
}
TRAINING = Training(iterations=200, batch_size=64, lr=3e-3)


def table(name: str):
    """Standardised rows for training, validation and test."""
    if name == "digits":
        x, y = datasets.load_digits(return_X_y=True)
    else:
        x, y = datasets.make_classification(
            1500, n_features=4, n_informative=4, n_redundant=0, n_classes=3, random_state=0
        )
    inputs, targets = torch.tensor(x).float(), torch.tensor(y)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inputs, targets = inputs[order], targets[order]
    half, last = len(inputs) // 2, 3 * len(inputs) // 4
    std, mean = torch.std_mean(inputs[:half], 0)
    inputs = ((inputs - mean) / std.clamp(min=1e-6)).clamp(-10, 10)  # pixels that are 0 almost everywhere
    return (inputs[:half], targets[:half]), inputs[half:last], inputs[last:]


def fitted(method, rows, activation: type[nn.Module] = nn.ReLU):
    inputs, targets = rows
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(inputs.shape[1], 64), activation(), nn.Linear(64, 64), activation(),
        nn.Linear(64, int(targets.max()) + 1),
    )  # fmt: skip
    return method.fit(network, rows, Categorical(), training=TRAINING)


def limits_of(prediction) -> dict[str, float]:
    return {name.removeprefix("usual_"): value for name, value in usual_epistemic(prediction).items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_far_rows_are_flagged_where_mutual_information_is_blind(name: str, method: str) -> None:
    train, validation, test = table(name)
    posterior = fitted(METHODS[method], train)
    limits, inside = limits_of(posterior.predict(validation)), posterior.predict(test)
    assert unlike(inside, limits).double().mean() < 0.06
    for factor, share in ((5, 0.7), (20, 0.97)):  # small rows times 5 may still lie among others
        far = posterior.predict(factor * test)
        found = detection(inside, far)
        assert unlike(far, limits).double().mean() > share
        assert found["function_variance"].auroc > 0.95
        if (name, method) != ("synthetic", "laplace"):  # there about .5: entropies of shrunk logits fall more slowly
            assert found["epistemic"].auroc < 0.5
        blind = unlike(far, {"epistemic": limits["epistemic"]})
        assert blind.double().mean() < 0.4


def test_a_network_without_uncertainty_flags_nothing() -> None:
    train, validation, test = table("synthetic")
    posterior = fitted(MAP(), train)
    limits = limits_of(posterior.predict(validation))
    assert limits == {"epistemic": 0, "function_variance": 0}
    assert not unlike(posterior.predict(20 * test), limits).any()


def test_saturating_networks_are_exempt() -> None:
    """Past its last bend, a network of tanh is constant, in every draw."""
    train, _, test = table("synthetic")
    posterior = fitted(METHODS["deep ensemble"], train, nn.Tanh)
    far, farther = (posterior.predict(factor * test).function_variance.mean() for factor in (200, 2000))
    torch.testing.assert_close(farther, far, rtol=0.1, atol=0)


def test_saved_posteriors_flag_far_rows_and_read_earlier_folders(tmp_path) -> None:
    settings = Settings(data="digits", held_out=0, training=TRAINING, num_samples=8)
    compare(settings, ["map", "deep-ensemble"], out=tmp_path)
    task = make_task(settings)
    assert task.data.input_scaling is not None
    near, far = (task.data.input_scaling.undo(factor * task.test.inputs[:50]).numpy() for factor in (1, 5))
    np.savez(tmp_path / "near.npz", inputs=near)
    np.savez(tmp_path / "far.npz", inputs=far)
    path = tmp_path / "deep-ensemble.safetensors"
    flagged = predict(path, tmp_path / "far.npz")
    assert flagged.num_unlike == 50 and flagged.note is None
    assert predict(path, tmp_path / "near.npz").num_unlike < 10
    assert min(flagged.columns["function_variance"]) > 0
    alone = predict(tmp_path / "map.safetensors", tmp_path / "far.npz")
    assert alone.num_unlike == 0 and alone.note is not None and "no epistemic uncertainty" in alone.note
    assert set(alone.columns["function_variance"]) == {0.0}

    folder = Folder(tmp_path)
    content = folder.read("deep-ensemble")
    del content["evidence"]["usual_function_variance"]  # as folders of earlier versions are
    folder.write("deep-ensemble", content)
    earlier = predict(path, tmp_path / "far.npz")
    assert earlier.note is None and earlier.num_unlike < flagged.num_unlike

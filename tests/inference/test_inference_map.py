"""MAP: the penalty of its prior, and its optimum against ridge and logistic regression."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from torch import Tensor, nn

from dubito import MAP, Categorical, ConfigError, Gaussian, NetworkError, Training
from dubito.objective import Objective
from dubito.training import SGD


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def minimised(built: Objective, inputs: Tensor, targets: Tensor) -> None:
    optimizer = torch.optim.LBFGS(
        built.draft.network.parameters(), max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = built.loss(inputs, targets).total
        total.backward()
        return total

    optimizer.step(closure)


def test_ridge_regression() -> None:
    inputs, noise_std, prior_std = normal(40, 3), 0.5, 0.3
    targets = inputs @ normal(3, 2, seed=1) + noise_std * normal(40, 2, seed=2)
    built = MAP(prior_std=prior_std).build(nn.Linear(3, 2, bias=False).double(), Gaussian(std=noise_std), num_data=40)
    minimised(built, inputs, targets)
    ridge = Ridge(alpha=noise_std**2 / prior_std**2, fit_intercept=False).fit(inputs, targets)
    np.testing.assert_allclose(built.posterior().network.weight, ridge.coef_, rtol=1e-6)


def test_the_prior_is_shared_out_over_the_rows_that_are_given() -> None:
    # Forty rows that stand for a hundred: the prior weighs 40/100 of what it weighs beside forty.
    inputs, noise_std, prior_std = normal(40, 3), 0.5, 0.1
    targets = inputs @ normal(3, 2, seed=1) + noise_std * normal(40, 2, seed=2)
    descent = Training(iterations=300, batch_size=40, lr=0.02, optimizer=SGD(momentum=0.9, nesterov=True))
    for num_data in (None, 100):
        posterior = MAP(prior_std=prior_std).fit(
            nn.Linear(3, 2, bias=False).double(),
            (inputs, targets),
            Gaussian(std=noise_std),
            training=descent,
            num_data=num_data,
        )
        alpha = noise_std**2 / prior_std**2 * 40 / (num_data or 40)
        ridge = Ridge(alpha=alpha, fit_intercept=False).fit(inputs, targets)
        np.testing.assert_allclose(posterior.network.weight, ridge.coef_, rtol=1e-6)


def test_logistic_regression() -> None:
    inputs, prior_std = normal(60, 3), 0.7
    targets = (inputs @ normal(3, 3, seed=1)).argmax(1)
    built = MAP(prior_std=prior_std).build(nn.Linear(3, 3, bias=False).double(), Categorical(), num_data=60)
    minimised(built, inputs, targets)
    logistic = LogisticRegression(C=prior_std**2, fit_intercept=False, tol=1e-10, max_iter=1000)
    logistic.fit(inputs, targets)
    expected = logistic.predict_proba(inputs)
    np.testing.assert_allclose(built.posterior().predict(inputs).probs, expected, rtol=1e-4, atol=1e-6)


def test_the_penalty_counts_trainable_parameters_only() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    network[0].weight.requires_grad_(False)
    squares = sum(p.square().sum() for name, p in network.named_parameters() if name != "0.weight")
    built = MAP(prior_std=0.5).build(network, Categorical(), num_data=10)
    torch.testing.assert_close(built.kl(), squares / (2 * 0.25))
    loss = built.loss(normal(5, 4), torch.zeros(5, dtype=torch.long), kl_weight=0.5)
    torch.testing.assert_close(loss.total, loss.nll + 0.05 * built.kl())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_flat_prior_costs_nothing(dtype: torch.dtype) -> None:
    built = MAP().build(nn.Linear(4, 3).to(dtype), Categorical(), num_data=10)
    loss = built.loss(normal(5, 4), torch.zeros(5, dtype=torch.long))
    assert loss.kl.item() == 0
    assert loss.kl.dtype == dtype
    assert torch.equal(loss.total, loss.nll)


def test_all_mass_lies_on_one_set_of_weights() -> None:
    posterior = MAP().build(nn.Linear(4, 3), Categorical(), num_data=10).posterior()
    outputs = posterior.sample_outputs(normal(5, 4), 3)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[1], outputs[2])
    assert posterior.num_atoms == 1
    torch.testing.assert_close(posterior.predict(normal(5, 4)).epistemic, torch.zeros(5), rtol=0, atol=1e-6)


def test_refusals() -> None:
    with pytest.raises(NetworkError, match="all have requires_grad=False"):
        MAP().build(nn.Linear(4, 3).requires_grad_(False), Categorical(), num_data=10)
    for prior_std in (0, -1.0, float("nan"), "1"):
        with pytest.raises(ConfigError, match="prior_std must be a finite number above 0"):
            MAP(prior_std=prior_std)  # pyright: ignore

"""Surfaces and draws, read back from the axes."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from dubito import DataError, plot


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_a_surface_has_its_highest_place_where_it_belongs() -> None:
    x, y = torch.linspace(-1, 1, 5), torch.linspace(0, 3, 7)
    values = -(x[:, None] - 0.5).abs() - (y - 2).abs()  # highest at (0.5, 2)
    axis = plot.loss_surface(values, x, y, name="accuracy")
    (drawn,) = axis.collections
    highest = [path.vertices for path in drawn.get_paths() if len(path.vertices)][-1]
    np.testing.assert_allclose(highest.mean(0), [0.5, 2], atol=0.2)
    assert axis.get_figure().axes[1].get_ylabel() == "accuracy"


def test_a_surface_shows_components_and_what_they_share() -> None:
    places, centre = normal(4, 2), torch.tensor([0.25, -0.5])
    x = y = torch.linspace(-2, 2, 4)
    axis = Figure().add_subplot()
    assert plot.loss_surface(normal(4, 4), x, y, components=places, centre=centre, axis=axis) is axis
    dots, star = axis.lines
    np.testing.assert_allclose(np.stack(dots.get_data(), 1), places.numpy())
    assert [list(each) for each in star.get_data()] == [[0.25], [-0.5]]


def test_surfaces_that_do_not_fit_are_refused() -> None:
    x = torch.linspace(0, 1, 3)
    with pytest.raises(DataError, match=r"shape \(3, 3\), one per place, got \(3, 4\)"):
        plot.loss_surface(normal(3, 4), x, x)
    with pytest.raises(DataError, match="finite"):
        plot.loss_surface(torch.full((3, 3), torch.nan), x, x)
    with pytest.raises(DataError, match=r"two different values .* got 1.0 and 1.0"):
        plot.loss_surface(torch.ones(3, 3), x, x)


def test_limits_are_those_of_the_colours() -> None:
    x = torch.linspace(0, 1, 3)
    (drawn,) = plot.loss_surface(100 * normal(3, 3), x, x, limits=(0.0, 2.0)).collections
    levels = drawn.levels
    assert (levels[0], levels[-1]) == pytest.approx((0, 2)) and drawn.extend == "both"


@pytest.mark.parametrize("names", [None, ["cat", "dog", "cow"]])
def test_draws_are_dots_around_the_bars_of_their_means(names: list[str] | None) -> None:
    probs = normal(6, 3).softmax(-1)
    axis = plot.class_draws(probs, class_names=names)
    (dots,) = axis.lines
    np.testing.assert_allclose(np.reshape(dots.get_ydata(), (6, 3)), probs.numpy())
    assert list(dots.get_xdata())[:3] == [0, 1, 2]
    np.testing.assert_allclose([bar.get_height() for bar in axis.patches], probs.mean(0).numpy(), rtol=1e-6)
    assert [text.get_text() for text in axis.get_xticklabels()] == (names or ["0", "1", "2"])


def test_draws_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match=r"shape \[draws, classes\], got \(3,\)"):
        plot.class_draws(torch.ones(3))
    with pytest.raises(DataError, match="must name 3 classes, got 2"):
        plot.class_draws(normal(2, 3).softmax(-1), class_names=["cat", "dog"])

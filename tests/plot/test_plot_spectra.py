"""What is drawn, read back from the axes."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure

from dubito import ConfigError, DataError, plot
from dubito.distributions.spectrum import Spectrum


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def positive(*shape: int) -> torch.Tensor:
    return normal(*shape, seed=2).mul(0.3).exp()


def spectrum(m: int = 6, n: int = 9) -> Spectrum:
    return Spectrum.of(normal(m, n), positive(m, n))


@pytest.mark.parametrize("centred", [False, True])
def test_explained_variance_draws_the_shares_of_both(centred: bool) -> None:
    spectra = {"fc1": spectrum(), "fc2": spectrum(4, 3)}
    axis = plot.explained_variance(spectra, centred=centred, most=5)
    assert len(axis.lines) == 4
    for number, (name, each) in enumerate(spectra.items()):
        std, mean = axis.lines[2 * number : 2 * number + 2]
        wanted = (each.std_centred, each.mean_centred) if centred else (each.std, each.mean)
        for line, shares, words in zip((std, mean), wanted, ("std", "mean"), strict=True):
            np.testing.assert_allclose(line.get_ydata(), shares[:5].numpy())
            assert list(line.get_xdata()) == list(range(1, min(5, len(shares)) + 1))
            assert line.get_label() == f"{name}, {words}"
        assert std.get_color() == mean.get_color() and std.get_linestyle() != mean.get_linestyle()
    assert ("centred" in axis.get_ylabel()) is centred


@pytest.mark.parametrize("shape", [(6, 9), (4, 3, 2, 2)])
@pytest.mark.parametrize("rank", [None, 1, 2])
def test_maps_show_the_matrix_or_numpys_best_approximation(shape: tuple[int, ...], rank: int | None) -> None:
    std = positive(*shape)
    axis = plot.std_map(std, rank=rank)
    (image,) = axis.images
    matrix = std.flatten(1).double().numpy()
    wanted = matrix
    if rank is not None:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        wanted = np.maximum((left[:, :rank] * values[:rank]) @ right[:rank], 0)
    np.testing.assert_allclose(np.asarray(image.get_array()), wanted.T, rtol=1e-4, atol=1e-5)
    assert image.get_clim() == pytest.approx((matrix.min(), matrix.max()))  # of the whole, so that maps compare
    assert len(axis.get_figure().axes) == 2  # its colours beside it


def test_maps_take_common_limits_and_cut_at_zero() -> None:
    std = torch.tensor([[1.0, 0.01, 1.0], [0.01, 1.0, 0.01], [1.0, 0.01, 1.3]])
    axis = plot.std_map(std, rank=1, limits=(0.0, 2.0))
    assert axis.images[0].get_clim() == (0.0, 2.0)
    mixed = torch.tensor([[1.0, -1.0], [-1.0, 1.5]])
    assert float(np.asarray(plot.std_map(mixed, rank=1).images[0].get_array()).min()) == 0.0


def test_stds_over_training() -> None:
    stds = {"fc1": [0.01, 0.05, 0.1], "fc2": [0.01, 0.02, 0.03]}
    axis = plot.stds_over_training([0, 10, 20], stds, warmup=8, prior_std=0.2)
    for line, (name, values) in zip(axis.lines, stds.items(), strict=False):
        assert line.get_label() == name
        assert list(line.get_xdata()) == [0, 10, 20] and list(line.get_ydata()) == values
    assert list(axis.lines[2].get_ydata()) == [0.2, 0.2]
    (shaded,) = axis.patches
    assert shaded.get_extents().transformed(axis.transData.inverted()).x1 == pytest.approx(8)
    assert len(plot.stds_over_training([0, 10, 20], stds).lines) == 2


def test_an_axis_given_is_the_one_returned_and_pyplot_is_left_alone() -> None:
    axes = Figure().subplots(1, 3)
    assert plot.explained_variance({"fc": spectrum()}, axis=axes[0]) is axes[0]
    assert plot.std_map(positive(3, 4), axis=axes[1]) is axes[1]
    assert plot.stds_over_training([1], {"fc": [0.1]}, axis=axes[2]) is axes[2]
    plot.std_map(positive(3, 4))
    assert pyplot.get_fignums() == []


def test_figures_can_be_kept(tmp_path) -> None:
    for name, axis in {
        "spectrum.png": plot.explained_variance({"fc": spectrum()}),
        "map.png": plot.std_map(positive(30, 40).bfloat16(), rank=None),
        "training.pdf": plot.stds_over_training([1, 2], {"fc": [0.1, 0.2]}),
    }.items():
        axis.get_figure().savefig(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


def test_refusals() -> None:
    with pytest.raises(DataError, match="at least one layer's spectrum by name"):
        plot.explained_variance({})
    with pytest.raises(ConfigError, match="most must be"):
        plot.explained_variance({"fc": spectrum()}, most=0)
    for std in (torch.ones(3), torch.full((2, 2), torch.nan), [[1.0]], torch.ones(0, 3)):
        with pytest.raises(DataError, match="std must be"):
            plot.std_map(std)  # pyright: ignore
    with pytest.raises(ConfigError, match="at most 3, the shorter side, got 4"):
        plot.std_map(positive(3, 4), rank=4)
    with pytest.raises(ConfigError, match="rank must be"):
        plot.std_map(positive(3, 4), rank=0)
    with pytest.raises(ConfigError, match="limits must be"):
        plot.std_map(positive(3, 4), limits=(1.0, 0.0))
    with pytest.raises(DataError, match="each of 2 steps, fc has 1"):
        plot.stds_over_training([1, 2], {"fc": [0.1]})
    with pytest.raises(DataError, match="at least one layer's values"):
        plot.stds_over_training([1, 2], {})
    with pytest.raises(ConfigError, match="axis must be an axis of matplotlib"):
        plot.std_map(positive(3, 4), axis="here")  # pyright: ignore


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("dubito.errors.import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'dubito\[report\]'"):
        plot.std_map(positive(3, 4))


def test_importing_the_room_does_not_import_matplotlib() -> None:
    code = "import dubito.plot, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

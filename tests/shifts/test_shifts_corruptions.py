"""Every corruption by its defining property, and by independent code where there is some."""

import colorsys
import itertools

import numpy as np
import pytest
import scipy.ndimage
import torch
from torch import Tensor

from dubito import ConfigError, DataError, UnknownNameError
from dubito.shifts import CORRUPTIONS, SEVERITIES, corrupt, corruptions, gaussian_mixed, jpeg, salt_and_pepper
from dubito.shifts.blur import disk
from dubito.shifts.constants import CONSTANTS
from dubito.shifts.digital import affine
from dubito.shifts.filters import box_resized, clouds, mirrored, sampled, smoothed, streaked, zoomed
from dubito.shifts.weather import frost_textures

RANDOM = {"gaussian-noise", "shot-noise", "impulse-noise", "glass-blur", "motion-blur", "snow", "frost", "fog",
          "elastic"}  # fmt: skip
every_corruption = pytest.mark.parametrize("name", CORRUPTIONS)


def pictures(count: int = 40, channels: int = 3, height: int = 32, width: int = 32, dtype=torch.float32) -> Tensor:
    """Smooth shapes with some texture, as photographs have."""
    stream = torch.Generator().manual_seed(0)
    rough = torch.rand(count, channels, height, width, generator=stream, dtype=torch.float64)
    smooth = smoothed(rough, 4.0)
    smooth = smooth - smooth.amin((2, 3), keepdim=True)
    smooth = smooth / smooth.amax((2, 3), keepdim=True)
    return (0.1 + 0.55 * smooth + 0.1 * rough).to(dtype)


def energy(name: str, severity: int, images: Tensor, constants: str = "cifar-c") -> float:
    return float((corrupt(images, name, severity, constants=constants) - images).square().mean())


# -- all of them --------------------------------------------------------------------------------------------


@every_corruption
@pytest.mark.parametrize("constants", ["cifar-c", "imagenet-c"])
def test_any_size_any_channels_and_the_same_by_seed(name, constants):
    for shape in ((3, 1, 16, 24), (2, 3, 33, 32)):
        images = pictures(*shape)
        before = images.clone()
        for severity in (1, 5):
            found = corrupt(images, name, severity, constants=constants, seed=4)
            assert found.shape == images.shape and found.dtype == images.dtype
            assert found.min() >= 0 and found.max() <= 1 and found.isfinite().all()
            assert not torch.equal(found, images)
            assert torch.equal(found, corrupt(images, name, severity, constants=constants, seed=4))
            other = corrupt(images, name, severity, constants=constants, seed=5)
            assert torch.equal(found, other) == (name not in RANDOM)
        assert torch.equal(images, before)


#: Where the published constants do not rise in energy: elastic warps change their kind, frost and glass blur mix two
#: effects (those have tests of their own).
RISING = [name for name in CORRUPTIONS if name not in ("elastic", "frost", "glass-blur")]


@pytest.mark.parametrize("name", RISING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_energy_rises_with_severity(name, dtype):
    images = pictures(dtype=dtype)
    energies = [energy(name, severity, images) for severity in SEVERITIES]
    # severities 3 and 4 of motion blur differ in the last pixels of their streaks alone, and in drawn directions
    assert all(after > 0.93 * before for before, after in itertools.pairwise(energies))
    assert energies[4] > 1.4 * energies[0]


@pytest.mark.parametrize("name", ["defocus-blur", "motion-blur", "zoom-blur", "glass-blur", "pixelate", "contrast"])
def test_blur_keeps_the_mean_and_lowers_the_contrast(name):
    images = pictures()
    for severity in SEVERITIES:
        found = corrupt(images, name, severity)
        # mirrored, repeated or cropped edges weigh a little more or less
        torch.testing.assert_close(found.mean((0, 2, 3)), images.mean((0, 2, 3)), atol=5e-3, rtol=0)
        differences = [(x[..., 1:] - x[..., :-1]).square().mean() for x in (found, images)]
        if name != "glass-blur":  # swapped pixels are rougher than their neighbourhood
            assert differences[0] < differences[1]


def test_both_tables_have_every_corruption():
    for table in CONSTANTS.values():
        assert tuple(table) == CORRUPTIONS and all(len(values) == 5 for values in table.values())
    # the published grids, as their code writes them, where rounding lets in some of the ends
    for name, ends in (("cifar-c", (1.06, 1.11, 1.16, 1.21, 1.26)), ("imagenet-c", (1.11, 1.16, 1.21, 1.26, 1.31))):
        steps = (0.01,) * 5 if name == "cifar-c" else (0.01, 0.01, 0.02, 0.02, 0.03)
        for end, step, found in zip(ends, steps, CONSTANTS[name]["zoom-blur"], strict=True):
            assert list(found) == pytest.approx(list(np.arange(1, end, step)))


def test_all_in_turn():
    images = pictures(2)
    found = [(name, severity) for name, severity, _ in corruptions(images, names=("fog", "jpeg"), severities=(2, 4))]
    assert found == [("fog", 2), ("fog", 4), ("jpeg", 2), ("jpeg", 4)]


def test_blocks_have_streams_of_their_own():
    images = pictures(1).expand(300, -1, -1, -1)
    found = corrupt(images, "gaussian-noise", 1)
    assert len({float(image.sum()) for image in found}) == 300


def test_refusals():
    images = pictures(2)
    with pytest.raises(UnknownNameError, match="did you mean 'fog'"):
        corrupt(images, "fogg", 1)
    with pytest.raises(UnknownNameError, match="cifar-c"):
        corrupt(images, "fog", 1, constants="cifar")
    with pytest.raises(ConfigError, match="from 1 to 5, got 6"):
        corrupt(images, "fog", 6)
    with pytest.raises(DataError, match="undo their scaling"):
        corrupt(3 * images, "fog", 1)
    with pytest.raises(DataError, match="divide them by 255"):
        corrupt((255 * images).byte(), "fog", 1)
    with pytest.raises(DataError, match="C of 1 or 3"):
        corrupt(images[0], "fog", 1)
    with pytest.raises(UnknownNameError):
        next(corruptions(images, names=("fog", "rain")))  # before any work


# -- noise --------------------------------------------------------------------------------------------------


def test_noise_has_its_moments():
    images = torch.full((200, 1, 32, 32), 0.5)
    count = images.numel()
    found = corrupt(images, "gaussian-noise", 5)
    assert float((found - 0.5).std()) == pytest.approx(0.1, abs=4 * 0.1 / (2 * count) ** 0.5)
    shots = corrupt(images, "shot-noise", 5) * 50  # counts of mean and variance 25
    assert torch.equal(shots.round(), shots.round().clamp(0, 50))
    assert float(shots.mean()) == pytest.approx(25, abs=4 * 5 / count**0.5)
    assert float(shots.var()) == pytest.approx(25, rel=0.02)
    impulses = corrupt(images, "impulse-noise", 5)
    for value in (0.0, 1.0):
        share = float((impulses == value).double().mean())
        assert share == pytest.approx(0.035, abs=4 * (0.035 / count) ** 0.5)


def test_the_implicit_papers_noise():
    images = pictures(50)
    assert torch.equal(gaussian_mixed(images, 0.0), images)
    noise = gaussian_mixed(images, 1.0, seed=2)
    assert float(noise.mean()) == pytest.approx(0, abs=4 / images.numel() ** 0.5)
    assert float(noise.std()) == pytest.approx(1, abs=0.01)
    torch.testing.assert_close(gaussian_mixed(images, 0.3, seed=2), 0.7 * images + 0.3 * noise)  # Eq. 28
    salted = salt_and_pepper(images, 0.4)
    changed = salted != images
    assert set(salted[changed].tolist()) == {0.0, 1.0}
    assert float(changed.double().mean()) == pytest.approx(0.4, abs=0.01)
    assert torch.equal(salt_and_pepper(images, 0.4), salted)
    with pytest.raises(ConfigError, match="share must be"):
        gaussian_mixed(images, 1.5)


# -- blur ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.4, 1.5, 9.0])
def test_smoothing_is_scipys(std):
    image = pictures(1, 1, 13, 20, torch.float64)
    for truncate in (3.0, 4.0):
        expected = scipy.ndimage.gaussian_filter(image[0, 0].numpy(), std, mode="reflect", truncate=truncate)
        torch.testing.assert_close(smoothed(image, std, truncate=truncate)[0, 0], torch.from_numpy(expected))


@pytest.mark.parametrize(("kind", "repeat_edge"), [("symmetric", True), ("reflect", False)])
def test_mirrors_are_numpys(kind, repeat_edge):
    for size, width in ((5, 3), (4, 11), (1, 2), (2, 7)):
        expected = np.pad(np.arange(size), width, mode=kind)
        index = torch.arange(-width, size + width)
        assert mirrored(index, size, repeat_edge=repeat_edge).tolist() == expected.tolist()


@pytest.mark.parametrize("radius", [0.3, 1, 1.5, 8, 10])
def test_disks_are_disks(radius):
    kernel = disk(radius, 0.1)
    assert float(kernel.sum()) == pytest.approx(1) and torch.allclose(kernel, kernel.T)
    inside = int((kernel > 0.5 * kernel.max()).sum())
    reach = int(radius)
    points = sum(x * x + y * y <= radius**2 for x in range(-reach, reach + 1) for y in range(-reach, reach + 1))
    assert inside == points
    point = torch.zeros(1, 1, 41, 41)
    point[0, 0, 20, 20] = 1
    found = corrupt(point, "defocus-blur", 5, constants="imagenet-c")
    assert float(found.sum()) == pytest.approx(1, rel=1e-5) and float((found > 1e-4).sum()) > 300


def test_glass_swaps_pixels_that_are_near():
    """Nothing is lost: between its two blurs the pixels are the same ones, at most one step away per swap."""
    images = torch.arange(16 * 16, dtype=torch.float64).reshape(1, 1, 16, 16).div(256).expand(3, 1, 16, 16)
    found = corrupt(images, "glass-blur", 1)  # a blur of std 0.05 has a single weight
    for image in found:
        assert torch.equal(image.flatten().sort().values, images[0].flatten())
    assert not torch.equal(found[0], found[1])
    twice, once = (corrupt(pictures(), "glass-blur", severity) for severity in (5, 3))  # two rounds, and one
    assert (twice - pictures()).square().mean() > (once - pictures()).square().mean()


def test_streaks_by_brute_force():
    image = pictures(2, 1, 9, 12, torch.float64)
    angles = torch.tensor([30.0, -120.0], dtype=torch.float64)
    found = streaked(image, 3, 2.0, angles)
    weights = np.exp(-0.5 * (np.arange(7) / 2.0) ** 2)
    weights /= weights.sum()
    for row in range(2):
        angle = np.deg2rad(float(angles[row]))
        for y, x in ((0, 0), (4, 5), (8, 11), (3, 10)):
            total = 0.0
            for step, weight in enumerate(weights):
                down, across = (int(np.ceil(step * side - 0.5)) for side in (np.sin(angle), np.cos(angle)))
                total += weight * float(image[row, 0, min(max(y + down, 0), 8), min(max(x + across, 0), 11)])
            assert float(found[row, 0, y, x]) == pytest.approx(total)


@pytest.mark.parametrize("factor", [1.03, 1.25, 2.25, 4.5])
def test_zooms_are_scipys(factor):
    image = pictures(1, 1, 32, 32, torch.float64)
    kept = int(np.ceil(32 / factor))
    top = (32 - kept) // 2
    expected = scipy.ndimage.zoom(image[0, 0, top : top + kept, top : top + kept].numpy(), factor, order=1)
    if len(expected) < 32:  # rounding left it short, which the published code passes on; here it is stretched
        assert zoomed(image, factor).shape == image.shape
        return
    trim = (len(expected) - 32) // 2
    found = zoomed(image, factor)[0, 0]
    torch.testing.assert_close(found, torch.from_numpy(expected[trim : trim + 32, trim : trim + 32].copy()))


# -- weather ------------------------------------------------------------------------------------------------


def test_brightness_is_that_of_hue_saturation_value():
    images = pictures(1, 3, 4, 4, torch.float64)
    images[0, :, 0, 0] = 0  # black has no hue
    found = corrupt(images, "brightness", 4)
    for y in range(4):
        for x in range(4):
            hue, saturation, value = colorsys.rgb_to_hsv(*images[0, :, y, x].tolist())
            expected = colorsys.hsv_to_rgb(hue, saturation, min(1.0, value + 0.2))
            assert found[0, :, y, x].tolist() == pytest.approx(expected)


def test_clouds_are_rougher_where_displacements_last():
    stream = torch.Generator().manual_seed(0)
    roughness = []
    for decay in (3.0, 1.75):
        field = clouds(20, 30, 32, decay, torch.empty(0), stream)
        assert field.shape == (20, 1, 30, 32) and field.min() >= 0 and field.max() <= 1
        roughness.append(float((field[..., 1:] - field[..., :-1]).square().mean() / field.var()))
    assert roughness[0] < roughness[1]
    whole = clouds(3, 32, 32, 2.0, torch.empty(0), stream)
    assert torch.equal(whole.amin((1, 2, 3)), torch.zeros(3)) and torch.equal(whole.amax((1, 2, 3)), torch.ones(3))


def test_fog_whitens_black_and_never_passes_the_brightest_pixel():
    images = pictures()
    found = corrupt(images, "fog", 5)
    assert (found.amax((1, 2, 3)) <= images.amax((1, 2, 3)) + 1e-6).all()
    black = torch.zeros(4, 3, 32, 32)
    black[:, :, 0, 0] = 1
    assert float(corrupt(black, "fog", 5).mean()) > 0.1
    assert (found.std((2, 3)) < images.std((2, 3))).double().mean() > 0.9


def test_frost_is_generated_once_and_lies_over_the_image():
    textures = frost_textures(64)
    assert torch.equal(textures, frost_textures(64)) and textures.shape == (5, 3, 64, 64)
    assert textures[:, 2].mean() > textures[:, 0].mean() > 0.3  # pale and bluish
    black = torch.zeros(20, 3, 16, 16)
    assert float(corrupt(black, "frost", 5).mean()) > float(corrupt(black, "frost", 1).mean()) > 0.05
    one, two = corrupt(black, "frost", 1)[:2]
    assert not torch.equal(one, two)
    grey = corrupt(black[:, :1], "frost", 1)
    assert grey.shape == (20, 1, 16, 16)


def test_snow_falls_on_black():
    black = torch.zeros(30, 1, 32, 32, dtype=torch.float64)
    found = corrupt(black, "snow", 3)
    assert (found > 0.2).double().mean() > 0.02
    # flakes fall: neighbours in the vertical are more alike than in the horizontal
    down, across = ((found.diff(dim=axis)).square().mean() for axis in (2, 3))
    assert down < across


# -- digital ------------------------------------------------------------------------------------------------


def test_contrast_keeps_a_share_of_the_deviations():
    images = pictures(4)
    found = corrupt(images, "contrast", 4)
    mean = images.mean((2, 3), keepdim=True)
    torch.testing.assert_close(found - mean, 0.3 * (images - mean))


def test_reading_elsewhere_is_scipys():
    image = pictures(1, 1, 11, 14, torch.float64)
    stream = torch.Generator().manual_seed(1)
    y, x = (torch.rand(1, 11, 14, generator=stream, dtype=torch.float64) * 40 - 13 for _ in range(2))
    for repeat_edge, mode in ((True, "reflect"), (False, "mirror")):
        expected = scipy.ndimage.map_coordinates(image[0, 0].numpy(), [y[0].numpy(), x[0].numpy()], order=1, mode=mode)
        found = sampled(image, x, y, repeat_edge=repeat_edge)[0, 0]
        torch.testing.assert_close(found, torch.from_numpy(expected))


def test_affine_maps_move_their_three_points():
    stream = torch.Generator().manual_seed(3)
    rows, columns = torch.meshgrid(*(torch.arange(30.0, dtype=torch.float64),) * 2, indexing="ij")
    ramps = torch.stack([columns, rows])[None].expand(5, 2, 30, 30)  # each pixel holds its own place
    assert torch.allclose(affine(ramps, 0.0, stream), ramps)
    moved = affine(ramps, 1.5, torch.Generator().manual_seed(3))
    inner = moved[:, :, 8:22, 8:22]
    second = inner.diff(n=2, dim=2).abs().max(), inner.diff(n=2, dim=3).abs().max()
    assert max(second) < 1e-9  # affine: no second differences
    corners = torch.tensor([[25, 25], [25, 5], [5, 5]], dtype=torch.float64)
    shift = torch.rand(5, 3, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3 - 1.5
    # at the new place of a point stands what was at its old one
    found = sampled(moved, (corners + shift)[..., 0][:, None], (corners + shift)[..., 1][:, None], repeat_edge=False)
    torch.testing.assert_close(found[:, :, 0], corners.T.expand(5, 2, 3), atol=1e-6, rtol=0)


def test_elastic_warps_are_smooth():
    images = pictures()
    for severity in SEVERITIES:
        found = corrupt(images, "elastic", severity)
        assert float((found - images).abs().mean()) > 0.005
        # places move, values hardly do
        ranks = [image.flatten().sort().values for image in (found, images)]
        assert float((ranks[0] - ranks[1]).abs().mean()) < 0.02


def picture(colourful: bool) -> Tensor:
    y, x = np.mgrid[:12, :10]
    if colourful:
        channels = [(37 * x + 11 * y) % 256, (255 - 19 * x + 5 * y * x) % 256, (x * y * 7 + 40) % 256]
    else:
        channels = [128 + 100 * np.sin(x / 3 + y / 4), 128 + 90 * np.cos(y / 3), 30 + 20 * x]
    return torch.from_numpy(np.stack(channels).astype(np.uint8))[None].double() / 255


#: What Pillow 12 (libjpeg-turbo) makes of two pictures at quality 40, and of one by boxes at 0.65 of its size.
ROUGH = (
    "24de1149e52968cc2e83b1359e9842bda569aea677525e38315a3829604025f11645f4296fe5398bcd45a1b14eb4b66b9eb0"
    "744d73404f916349986b13ff1023f8125ef9338af350a7e664bbee879de38a60bb6c46b87341be7c54ff6139e03a73df56a7"
    "e67bcceb9bdefbbbb0e3ab84cc9c84dbb082e3ba67a890163a2e3e28356a2f4f8b3e6a914979451e4a2c183d201535221d3b"
    "b0afd93b1e54680d5c931a77ae3093aa3c9d51095f511a6b69307d703883b3b0c13918377c1d57ac327db84797a74ea04a1c"
    "676b4a997946a2854cabaebdc03827378b3a65b64f86a6578e8054851c2046535f899681baa985c594c7c82b3d497c4b6bb7"
    "7a9c755e72475c5d37826b59a8897fa188929e8894ccb3364d3d88565fb57c856d675b4978563ca4695bbf7fc7edbad3daae"
    "abc97f5d571bae5d3fc971597c633a6b8c5564bd797bc98f7e78608c5d55b4c663735e0bc3622fcf683d815e28819b5a81d3"
    "8b92d39d8b6f64aa616c"
)
SMOOTH = (
    "91d6019edb13b8e032cae655d8e579d3e593c4e2acb0e4be8edec384e1cc9ece06aad317bed735cfdb55d8da75d0d791bcd6"
    "a7a7d8bb84d1bf79d5c8b8bf0fc1c21ed0c538d8c656dac574ccc28db4c1a59bc3b875bdba68c2c3d2ae1cd6af26dfaf40df"
    "b058d9ac73c6a98baaa7a08eaab565a6b857abc3e69424e8952de99443e3925ad48f72bb8b879c8b9e7c8fb0558bb94791c2"
    "ea7724e8782ee3763ed67353c1706ca66d80866d976770ab436fb63674bfe05b22da5a29d05939bf574ca753638b517a6d50"
    "925152a53253b42757bdd14923ca492abd4739a9454d904363753f79593d91413ea52b3eb62241bebe4027b53d2ca23a398a"
    "35486e315b542d703d29882c299e252db62130c1a933259e332b8a3137712d46562a5b4026702e238922209f2626ba2527c7"
    "9a2d288e2c2d782c395f2a4845285e31267425238e2020a42e29c33129ce98302f8b2f34732f3e5b2e4f412e65312e7d292d"
    "99272aaf3932ce3e31d9"
)
BOXES = (
    "9cd8289cd828c6d846ded864ded864dbd88cdbd88cbed8aa92d8c892d8c89cd8289cd828c6d846ded864ded864dbd88cdbd8"
    "8cbed8aa92d8c892d8c8bdc628bdc628dbc646e2c664e2c664c7c68cc7c68c9ec6aa6dc6c86dc6c8d5a328d5a328e3a346d7"
    "a364d7a364a9a38ca9a38c79a3aa4ba3c84ba3c8d5a328d5a328e3a346d7a364d7a364a9a38ca9a38c79a3aa4ba3c84ba3c8"
    "e26928e26928d86946b76964b769647a698c7a698c4b69aa2a69c82a69c8e26928e26928d86946b76964b769647a698c7a69"
    "8c4b69aa2a69c82a69c8d73828d73828b838468a38648a38644b388c4b388c2938aa1e38c81e38c8d73828d73828b838468a"
    "38648a38644b388c4b388c2938aa1e38c81e38c8c12628c1262896264665266465266430268c30268c1c26aa2426c82426c8"
    "a22d28a22d28712d46452d64452d64212d8c212d8c1f2daa382dc8382dc8a22d28a22d28712d46452d64452d64212d8c212d"
    "8c1f2daa382dc8382dc8"
)


def bytes_of(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), np.uint8).reshape(12, 10, 3).copy()).permute(2, 0, 1)


@pytest.mark.parametrize(("colourful", "expected"), [(True, ROUGH), (False, SMOOTH)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_jpeg_is_what_a_decoder_shows(colourful, expected, dtype):
    found = (jpeg(picture(colourful).to(dtype), 40)[0] * 255).round()
    truth = bytes_of(expected).to(dtype)
    # Encoders compute cosines in whole numbers: a level or two of 255 may differ, where JPEG itself changes many.
    assert float((found - truth).abs().max()) <= 3 and float((found - truth).abs().mean()) < 0.1
    assert float((picture(colourful)[0] * 255 - truth).abs().mean()) > 1.4


def test_jpeg_keeps_flat_pictures_and_is_settled_after_once():
    flat = torch.full((1, 3, 20, 20), 100 / 255)
    torch.testing.assert_close(jpeg(flat, 90), flat, atol=1.5 / 255, rtol=0)
    grey = pictures(5, 1)
    once = jpeg(grey, 40)
    assert ((jpeg(once, 40) - once).abs() > 1.5 / 255).double().mean() < 0.01
    errors = [float((jpeg(grey, quality) - grey).square().mean()) for quality in (95, 60, 25, 5)]
    assert errors == sorted(errors)
    with pytest.raises(ConfigError, match="quality"):
        jpeg(grey, 0)


def test_pixels_are_boxes():
    image = picture(False)
    small = box_resized(image, int(12 * 0.65), int(10 * 0.65))
    found = box_resized(small, 12, 10)[0] * 255
    assert float((found - bytes_of(BOXES)).abs().max()) <= 1  # Pillow rounds on the way
    assert len(small[0, 0].unique()) >= len(found[0].unique())
    torch.testing.assert_close(box_resized(image, 6, 5), torch.nn.functional.avg_pool2d(image, 2))

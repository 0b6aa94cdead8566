"""Second moments of convolutions' patches, with and without forming the patches, against plain indexing."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito.layers.context import Context
from dubito.layers.convolution import Convolution
from dubito.layers.form import Form
from dubito.layers.grams import mirrored
from dubito.layers.passes import asking


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Seen(Context):
    """Keeps the last form and its inputs, padded by the module where the padding has a mode."""

    form: Form
    inputs: Tensor

    def use(self, form: Form, x: Tensor, *args: object, **options: object) -> Tensor:
        self.form, self.inputs = form, x
        return super().use(form, x, *args, **options)  # pyright: ignore[reportArgumentType]


def moment(layer: nn.Module, x: Tensor) -> Tensor:
    """Σ a aᵀ over patches [G, n, n], columns in the weight's order, by plain indexing."""
    pads = layer._reversed_padding_repeated_twice
    x = F.pad(x, pads, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    spans = [(k - 1) * d + 1 for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    starts = [range(0, size - s + 1, step) for size, s, step in zip(x.shape[2:], spans, layer.stride, strict=True)]
    total = torch.zeros(())
    for start in product(*starts):
        window = [slice(a, a + s, d) for a, s, d in zip(start, spans, layer.dilation, strict=True)]
        patch = x[(slice(None), slice(None), *window)].reshape(len(x), layer.groups, -1)
        total = total + torch.einsum("bgi,bgj->gij", patch, patch)
    return total


MOMENTS: dict[str, tuple[nn.Module, tuple[int, ...], bool]] = {
    "3x3": (nn.Conv2d(8, 2, 3, padding=1), (8, 6, 5), True),
    "valid 5x5": (nn.Conv2d(8, 2, 5), (8, 12, 11), True),
    "wide padding": (nn.Conv2d(8, 2, 3, padding=3), (8, 6, 5), True),
    "one padded side": (nn.Conv2d(8, 2, (3, 3), padding=(0, 1)), (8, 6, 5), True),
    "even kernel": (nn.Conv2d(8, 2, (2, 4), padding="same"), (8, 7, 6), True),
    "dilated": (nn.Conv2d(8, 2, 3, padding=2, dilation=2), (8, 9, 8), True),
    "grouped": (nn.Conv2d(24, 6, 3, padding=1, groups=3), (24, 6, 5), True),
    "circular": (nn.Conv2d(8, 2, 3, padding=1, padding_mode="circular"), (8, 6, 7), True),
    "reflect": (nn.Conv2d(8, 2, (1, 3), padding=(0, 2), padding_mode="reflect"), (8, 6, 7), True),
    "1d": (nn.Conv1d(9, 2, 4, padding=2), (9, 20), True),
    "3d": (nn.Conv3d(8, 2, (3, 2, 3), padding=(1, 0, 1)), (8, 4, 5, 6), True),
    "strided": (nn.Conv2d(8, 2, 3, padding=1, stride=2), (8, 6, 5), False),
    "few channels": (nn.Conv2d(3, 2, 3, padding=1), (3, 6, 5), False),
    "small image": (nn.Conv2d(8, 2, 3, padding=1), (8, 2, 2), False),
    "kernel as large as the image": (nn.Conv2d(8, 2, (4, 3)), (8, 4, 3), False),
    "pointwise": (nn.Conv2d(8, 2, 1), (8, 4, 3), False),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MOMENTS)
def test_second_moments_of_patches(name: str, dtype: torch.dtype) -> None:
    layer, shape, shifted = MOMENTS[name]
    seen = Seen()
    with asking(layer.to(dtype), seen, ["weight"]) as shell:
        shell(normal(5, *shape).to(dtype))
    use, x = seen.form, seen.inputs
    assert isinstance(use, Convolution)
    assert use._shifts_pay(x) is shifted
    sums = torch.zeros(use.groups, use.columns, use.columns, dtype=dtype)
    use.add_moment(sums, x)
    use.add_moment(sums, x)  # sums are added to
    place = torch.arange(use.columns) if use.order is None else use.order.argsort()
    moments = mirrored(sums)[:, place][:, :, place]
    expected = 2 * moment(layer, normal(5, *shape).to(dtype).double())
    error = (moments.double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    total = use.inputs(x).sum((0, 2))
    torch.testing.assert_close(use.total(x), total)

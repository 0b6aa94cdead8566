"""How much memory a tile of all components would take, and whether it is there."""

import torch

from ..inputs import TensorOptions

#: Tensors that a step keeps per layer: its input, the scaled input, the output, the scaled output, gradients.
KEPT = 5
#: Activations beyond this leave the caches of CPUs, and their pages are mapped and zeroed at every step.
CPU_TENSOR_BYTES = 4 * 2**20


def tile_fits(rows: int, row_size: float, largest: float, like: TensorOptions) -> bool:
    """Whether a tile of so many rows is the faster way.

    Args:
        rows: of the whole tile.
        row_size: numbers that all layers read per row.
        largest: those of the layer that reads most.
        like: dtype and device of the network.
    """
    size = torch.finfo(like.dtype).bits // 8
    if like.device.type == "cpu":
        return rows * largest * size <= CPU_TENSOR_BYTES
    return KEPT * rows * row_size * size <= 0.5 * free_bytes(like.device)


def free_bytes(device: torch.device) -> float:
    """Memory an accelerator has left; endless where it does not tell."""
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        return float(module.mem_get_info(device)[0])
    if hasattr(module, "recommended_max_memory"):
        return float(module.recommended_max_memory() - module.current_allocated_memory())
    return float("inf")

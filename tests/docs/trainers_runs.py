"""The recipes of `docs/trainers.md` in several processes: `torchrun … trainers_runs.py fsdp file`, or `lightning`."""

import os
import sys
import warnings
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from dubito import MAP, KTied, MeanField

BLOCKS = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text().split("```python\n")[1:]
CODE = [block.split("```")[0] for block in BLOCKS]


def weights(posterior) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in posterior.stored().items()}


def main(recipe: str, path: str, processes: int) -> None:
    space: dict = {"__name__": "recipe"}
    exec(CODE[0], space)
    if recipe == "lightning":
        exec(CODE[1].split("\n\nprint(")[0], space)
        fitted = {"k-tied": weights(space["with_lightning"](processes, epochs=3))}
    else:
        exec(CODE[3], space)
        if processes > 1:
            distributed.init_process_group("gloo")
        methods = {"map": MAP(prior_std=1.0), "mean-field": MeanField(), "k-tied": KTied()}
        fitted = {name: weights(space["with_fsdp"](method)) for name, method in methods.items()}
        if processes > 1:
            _refuses(space)
            distributed.destroy_process_group()
    torch.save(fitted, f"{path}.{os.environ.get('LOCAL_RANK', 0)}")


def _refuses(space: dict) -> None:
    """A network that is sharded already is refused with the remedy."""
    net = torch.nn.Linear(4, 2)
    space["fully_shard"](net, mesh=init_device_mesh("cpu", (2,)))
    try:
        MAP().build(net, space["Categorical"](), num_data=8)
    except Exception as error:
        assert "fully_shard on the objective's own network" in str(error), error
    else:
        raise AssertionError("a sharded network was taken")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

"""Noise for labels drawn from the model: a function of the row, not of the batch or the pass."""

from collections.abc import Callable

from torch import Tensor

from .. import seeds

#: Numbers of noise that are drawn and kept together.
LABEL_BLOCK = 1 << 18


class LabelNoise:
    """Noise that draws labels: a row's labels are the same whatever batch it comes in, and in every pass.

    Args:
        seed: of the labels.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[int, seeds.RowNoise] = {}

    def at(self, first_row: int, outputs: Tensor) -> Callable[[int], Tensor]:
        """For rows from `first_row` on: a function from the number of the draw to its noise."""

        def drawn(number: int) -> Tensor:
            if number not in self._streams:
                block = max(1, min(1024, LABEL_BLOCK // outputs[0].numel()))  # whatever the batch size
                self._streams[number] = seeds.RowNoise(self.seed, "labels", number, block=block)
            return self._streams[number].rows(first_row, outputs)

        return drawn

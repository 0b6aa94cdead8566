"""How to train: frozen settings that check themselves."""

from dataclasses import dataclass

from ..errors import require_count, require_positive


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training run.

    Args:
        epochs: passes over the data.
        batch_size: rows per step; None takes the loader's own, or 128.
        lr: learning rate.
    """

    epochs: int = 50
    batch_size: int | None = None
    lr: float = 1e-3

    def __post_init__(self) -> None:
        require_count(epochs=self.epochs)
        require_positive(lr=self.lr)
        if self.batch_size is not None:
            require_count(batch_size=self.batch_size)

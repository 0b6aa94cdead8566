"""All tables by name; a new one is a module with its tables, and a line here."""

from ..errors import unknown_name
from . import (
    bali_binary,
    bali_foreign,
    bali_toy,
    bali_uci,
    implicit_cubic,
    implicit_draws,
    implicit_images,
    implicit_plane,
    inf_active,
    inf_bytes,
    inf_foreign,
    inf_information,
    inf_lemma,
    inf_sizes,
    inf_toy,
    inf_uci,
    ktied_costs,
    ktied_training,
    ktied_truncation,
    rank1_clinical,
    rank1_images,
)
from .experiment import Table

MODULES = (
    bali_binary,
    bali_foreign,
    bali_toy,
    bali_uci,
    implicit_cubic,
    implicit_draws,
    implicit_images,
    implicit_plane,
    inf_active,
    inf_bytes,
    inf_foreign,
    inf_information,
    inf_lemma,
    inf_sizes,
    inf_toy,
    inf_uci,
    ktied_costs,
    ktied_training,
    ktied_truncation,
    rank1_clinical,
    rank1_images,
)


class Tables(dict[str, Table]):
    """Tables by name; asking for an unknown one lists the known."""

    def __missing__(self, name: object) -> Table:
        raise unknown_name("table or figure", name, self)


def tables() -> Tables:
    """Every table and figure under its command-line name."""
    return Tables({table.name: table for module in MODULES for table in module.TABLES})

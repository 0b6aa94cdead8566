"""Numbers as people read them."""


def readable(value: float, digits: int = 4) -> str:
    """A number with so many significant digits, thousands apart, and no exponent where it can be read without."""
    if value == 0 or not abs(value) < float("inf"):
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")
    power = int(f"{rounded:e}".partition("e")[2])
    if not -5 <= power < 15:
        return f"{rounded:g}"
    return f"{rounded:,.{max(0, digits - 1 - power)}f}"


def with_error(value: float, error: float) -> str:
    """A number and its error to two digits, both to the same place: 16,170 ± 1,600."""
    if not 0 < error < float("inf"):
        return readable(value)
    place = 1 - int(f"{error:.1e}".partition("e")[2])
    shown = max(0, min(place, 6))
    return f"{round(value, place):,.{shown}f} ± {round(error, place):,.{shown}f}"


def size(nbytes: float) -> str:
    """Bytes in words."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= step:
            return f"{nbytes / step:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def duration(seconds: float) -> str:
    """A time in words."""
    for unit, step in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * step:
            return f"{seconds / step:.2g} {unit}"
    return f"{seconds:.2g} seconds" if seconds < 99.5 else f"{seconds:.0f} seconds"


def times(ratio: float) -> str:
    """How many times as much."""
    return f"{ratio:.1f}×" if 0.05 <= ratio < 9.95 else f"{ratio:,.0f}×" if ratio > 1 else f"{ratio:.1g}×"


def listed(names: list[str]) -> str:
    """Names in a sentence."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

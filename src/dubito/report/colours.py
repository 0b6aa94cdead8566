"""One colour, dash and marker per method, the same in every chart; safe for colour-blind readers.

Eight hues near those of Okabe and Ito (2008), moved as little as keeps every two apart for all kinds of colour
blindness and thin lines visible on their ground (the tests measure both). Where there are more methods, a hue comes
again, mixed with ink or paper and with another dash and marker, so that colour is never the only mark.
"""

from collections.abc import Iterable

#: The hues on light and on dark ground; the last is ink, which the baseline takes.
LIGHT = ("#006bb5", "#cc5900", "#009570", "#a54489", "#d28303", "#3d9dd9", "#6b5921", "#3a3f47")
DARK = ("#499de0", "#f0703c", "#2bc797", "#d070b0", "#e9ab2e", "#b0c8f5", "#f2de49", "#d6dcdf")
#: How a hue varies when it comes again: how much of it is left, what it is mixed with, dash, marker.
VARIANTS = (
    (100, "--ink", "none", "circle"),
    (68, "--ink", "7 3", "square"),
    (62, "--paper", "2 3", "triangle"),
    (80, "--ink", "9 3 2 3", "diamond"),
)


def places(names: Iterable[str], known: Iterable[str]) -> dict[str, int]:
    """The number of each method's style: by the registry's order, so that pages agree; the baseline takes ink.

    Args:
        names: methods of the page.
        known: all methods of the registry.
    """
    others = [name for name in dict.fromkeys((*known, *names)) if name != "map"]
    found = {"map": len(LIGHT) - 1}
    numbers = (number for number in range(len(LIGHT) * len(VARIANTS)) if number != found["map"])
    found |= dict(zip(others, numbers, strict=False))
    return {name: found.get(name, 0) for name in names}


def variant(place: int) -> tuple[int, str, str, str]:
    """How the hue of a style is varied."""
    return VARIANTS[place // len(LIGHT) % len(VARIANTS)]


def marker(place: int) -> str:
    """The marker of a style."""
    return variant(place)[3]


def rules(used: Iterable[int]) -> str:
    """The style sheet's lines for the styles of a page."""
    lines = []
    for place in sorted(used):
        share, other, dash, _ = variant(place)
        hue = f"var(--hue{place % len(LIGHT)})"
        colour = hue if share == 100 else f"color-mix(in oklab, {hue} {share}%, var({other}))"
        lines.append(f".m{place}{{--colour:{colour};--dash:{dash}}}")
        lines.append(f"body:has(#on{place}:not(:checked)) :is(g,figure,details).m{place}{{display:none}}")
        lines.append(f"body:has(.pick label.m{place}:hover) svg g.m:not(.m{place}){{opacity:.1}}")
    return "\n".join(lines)


def hues(colours: Iterable[str]) -> str:
    """The hues as the style sheet's variables."""
    return "".join(f"--hue{number}:{colour};" for number, colour in enumerate(colours))

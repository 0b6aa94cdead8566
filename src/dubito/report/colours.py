"""One colour, dash and marker per method, the same in every chart; safe for colour-blind readers.

Eight hues near those of Okabe and Ito (2008), moved as little as keeps every two apart for all kinds of colour
blindness and thin lines visible on their ground (the tests measure both). Where there are more methods, a round of the
same hues with ink follows, then one of hues found by search to be far from all others, each with another dash and
marker, so that colour is never the only mark.
"""

from collections.abc import Iterable, Sequence

Palette = Sequence[Sequence[str]]

#: The hues on light and on dark ground, in rounds of one dash and marker each; the first round ends with ink, which
#: the baseline takes. The second round is the first with 30 % ink.
LIGHT: Palette = (
    ("#006bb5", "#cc5900", "#009570", "#a54489", "#d28303", "#3d9dd9", "#6b5921", "#3a3f47"),
    ("#195486", "#944921", "#1f6f58", "#7a3b69", "#976426", "#37759e", "#524726"),
    ("#7154ce", "#298c01", "#861309", "#c37c7b", "#937af7", "#591f97", "#8c606d"),
)
DARK: Palette = (
    ("#499de0", "#f0703c", "#2bc797", "#d070b0", "#e9ab2e", "#b0c8f5", "#f2de49", "#d6dcdf"),
    ("#7eb6e7", "#f49978", "#7ad4b2", "#db97c4", "#ebc179", "#c2d4f5", "#f0e48a"),
    ("#9c5eef", "#84c030", "#b26232", "#feb4f7", "#f877ef", "#6af18f", "#548c88"),
)
#: The dash and the marker of each round; a fourth round has the hues of the first again.
ROUNDS = (("none", "circle"), ("7 3", "square"), ("2 3", "triangle"), ("9 3 2 3", "diamond"))
SIZE = len(LIGHT[0])
BASELINE = SIZE - 1


def places(names: Iterable[str], known: Iterable[str]) -> dict[str, int]:
    """The number of each method's style: by the registry's order, so that pages agree; the baseline takes ink.

    Args:
        names: methods of the page.
        known: all methods of the registry.
    """
    others = [name for name in dict.fromkeys((*known, *names)) if name != "map"]
    numbers = (number for number in range(SIZE * len(ROUNDS)) if number % SIZE != BASELINE)
    styles = {"map": BASELINE, **dict(zip(others, numbers, strict=False))}
    return {name: styles.get(name, 0) for name in names}


def marker(place: int) -> str:
    """The marker of a style."""
    return ROUNDS[place // SIZE][1]


def rules(used: Iterable[int]) -> str:
    """The style sheet's lines for the styles of a page."""
    lines = []
    for place in sorted(used):
        turn, hue = divmod(place, SIZE)
        colour = f"var(--hue{turn % len(LIGHT)}-{hue})"
        lines.append(f".m{place}{{--colour:{colour};--dash:{ROUNDS[turn][0]}}}")
        lines.append(f"body:has(#on{place}:not(:checked)) :is(g,figure,details).m{place}{{display:none}}")
        # Where all methods are one picture, those that were not chosen stay, faint.
        lines.append(f"body:has(#on{place}:not(:checked)) .together g.m{place}{{display:inline;opacity:.3}}")
        lines.append(f"body:has(.pick label.m{place}:hover) svg g.m:not(.m{place}){{opacity:.1}}")
    return "\n".join(lines)


def variables(palette: Palette) -> str:
    """The hues as the style sheet's variables."""
    return "".join(
        f"--hue{turn}-{hue}:{colour};" for turn, hues in enumerate(palette) for hue, colour in enumerate(hues)
    )

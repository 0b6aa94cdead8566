"""Words that the page explains where they stand: a pointer, a key or a finger on them shows what they mean."""

import re
from html import escape

from ..compare.table import COLUMNS, SETS

TERMS = {
    **{heading: told for _, heading, _, _, told in COLUMNS},
    "AUROC": "chance that an out-of-distribution row is more uncertain than a test row; 0.5 is guessing",
    "NLL": "negative log-likelihood of the true outcome, in nats: low where it was given a high probability",
    "RMSE": "root mean squared error of the predicted mean, in the target's units",
    "Accuracy": "share of rows whose likeliest class is the true one",
    "Confidence": "the probability of the likeliest class",
    "confidence": "the probability of the likeliest class",
    "Entropy": "uncertainty of the predicted probabilities, in nats: 0 where one class has probability 1",
    "Standard deviation": "of the predicted distribution, both parts of its uncertainty together",
    "Aleatoric": "uncertainty of the data: noise that more rows would not remove",
    "epistemic": "uncertainty of the weights: what more rows would remove",
    "validation rows": "rows held out of training that stop it and choose settings",
    "95 % intervals": "of a bootstrap over test rows, and over splits where there are several",
    **SETS,
}
_WORDS = re.compile(r"(<[^>]*>)|(?<![\w-])(" + "|".join(map(re.escape, sorted(TERMS, key=len)[::-1])) + r")(?![\w-])")


def explained(text: str) -> str:
    """HTML in which the first of each of the `TERMS` tells what it means."""
    seen: set[str] = set()

    def told(match: re.Match[str]) -> str:
        word = match[2]
        if word is None or word.lower() in seen:
            return match[0]
        seen.add(word.lower())
        return term(word, TERMS[word])

    return _WORDS.sub(told, text)


def term(word: str, told: str) -> str:
    """A word with its explanation, which can be pointed at, reached by keys and touched."""
    return f'<abbr tabindex="0" title="{escape(told)}">{escape(word)}</abbr>'

"""What earlier versions stored of a method, in today's words."""

from typing import Any


def current(evidence: dict[str, Any], target: str) -> dict[str, Any]:
    """Evidence of format 1 (dubito 0.1.0) in format 2, which names standard deviations of reals as such, by target.

    The numbers stay: format 1 held the same standard deviations, of several targets their geometric mean.

    Args:
        evidence: as stored.
        target: what was predicted.
    """
    if "coverage" not in evidence:  # classes, whose names are still the same
        return evidence
    renamed = {"usual_epistemic": "usual_epistemic_std"}
    evidence = {renamed.get(name, name): value for name, value in evidence.items()}
    sets = evidence.pop("decomposition", {})
    evidence["decomposition_std"] = {target: {name: _std(parts) for name, parts in sets.items()}}
    evidence["doubtful"] = [_std(entry) for entry in evidence.get("doubtful", [])]
    return evidence


def _std(values: dict[str, Any]) -> dict[str, Any]:
    renamed = {"aleatoric": "aleatoric_std", "epistemic": "epistemic_std"}
    return {renamed.get(name, name): value for name, value in values.items()}

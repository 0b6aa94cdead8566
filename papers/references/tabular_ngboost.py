"""NGBoost on arrays of one file, answers into another; run by the Python of the peers' environment, without dubito.

It needs pandas below 3. `python -P tabular_ngboost.py QUESTION.npz ANSWER.npz`.
"""

import json
import pickle
import sys
import time
import warnings
from importlib.metadata import version

import numpy as np
from ngboost import NGBClassifier, NGBRegressor  # pyright: ignore[reportMissingImports]
from ngboost.distns import Normal, k_categorical  # pyright: ignore[reportMissingImports]
from sklearn.tree import DecisionTreeRegressor


def main(question: str, answer: str) -> None:
    """Fit, with as many trees as have the least loss on the watched rows, and answer."""
    warnings.simplefilter("ignore")
    with np.load(question) as file:
        arrays = dict(file)
    settings = json.loads(str(arrays["settings"]))
    classes = settings.pop("classes")
    patience, tree = settings.pop("patience"), settings.pop("tree")
    common = {"Base": DecisionTreeRegressor(**tree), "verbose": False, **settings}
    model = NGBClassifier(Dist=k_categorical(classes), **common) if classes else NGBRegressor(Dist=Normal, **common)
    start = time.process_time()
    model.fit(
        arrays["train_x"],
        arrays["train_y"],
        X_val=arrays["watched_x"],
        Y_val=arrays["watched_y"],
        early_stopping_rounds=patience,
    )
    seconds = time.process_time() - start
    trees = model.best_val_loss_itr + 1
    answers = {}
    for part in ("test", "unknown"):
        law = model.pred_dist(arrays[f"{part}_x"], max_iter=trees)
        answers |= {f"{part}_probs": law.probs.T} if classes else {f"{part}_mean": law.loc, f"{part}_std": law.scale}
    facts = {"trees": trees, "ngboost": version("ngboost")}
    size = len(pickle.dumps((model.base_models[:trees], model.scalings[:trees], model.col_idxs[:trees])))
    np.savez(answer, cpu_seconds=seconds, nbytes=size, facts=json.dumps(facts), **answers)


if __name__ == "__main__":
    main(*sys.argv[1:])

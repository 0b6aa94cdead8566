"""Every named data set."""

from typing import Any

from . import physionet, synthetic
from .bundled import from_sklearn
from .images import IMAGES
from .readers import npz_reviews
from .registry import Entry, File, StoredForm, TaskKind
from .synthetic import drawn
from .tables import TABLES
from .uci import BINARY, UCI


def _sklearn(task: TaskKind, loader: str, rows: int, target: str, licence: str, **options: bool) -> Entry:
    return Entry(
        task=task,
        licence=licence,
        source=f"scikit-learn, {loader}",
        target_name=target,
        build=from_sklearn(loader, **options),
        rows=rows,
        module="sklearn",
        splits=20,
    )


def _synthetic(name: str, law: synthetic.Law, num_data: int, source: str, **options: Any) -> Entry:
    settings: dict[str, Any] = {"task": "regression", "target_name": "y"} | options
    return Entry(
        licence="none needed: generated",
        source=source,
        build=drawn(name, law, num_data),
        rows=num_data,
        splits=20,
        standardise=False,
        sized=True,
        **settings,
    )


_UCI = "UCI, CC BY 4.0; by way of scikit-learn, BSD 3-clause"

ENTRIES: dict[str, Entry] = {
    "digits": _sklearn("classification", "load_digits", 1797, "digit", _UCI),
    "breast-cancer": _sklearn("binary", "load_breast_cancer", 569, "benign", _UCI),
    "wine": _sklearn("classification", "load_wine", 178, "cultivar", _UCI),
    # Unscaled: scikit-learn's scaled columns know all rows, the test rows among them
    "diabetes": _sklearn(
        "regression",
        "load_diabetes",
        442,
        "progression",
        "none stated (Efron et al. 2004); by way of scikit-learn, BSD 3-clause",
        scaled=False,
    ),
    "sinc": _synthetic("sinc", synthetic.sinc, 128, "BALI, Section 5.1 (128 points; App. H.1 says 256)"),
    "sines-trend": _synthetic("sines-trend", synthetic.sines_trend, 32, "BALI, Section 5.1 and App. H.1"),
    "two-moons": _synthetic(
        "two-moons",
        synthetic.two_moons,
        128,
        "BALI, Section 5.1 and App. H.1",
        task="binary",
        target_name="moon",
        module="sklearn",
        class_names=("upper", "lower"),
    ),
    "cubic-inf": _synthetic("cubic-inf", synthetic.cubic, 100, "INF, Section 4.1"),
    "cubic-implicit": _synthetic(
        "cubic-implicit",
        synthetic.cubic,
        30,
        "implicit BNN, Section 3.1, which states the function and the number of points; range and noise, which "
        "it does not state, are those of INF's set",
    ),
    **UCI,
    **BINARY,
    **TABLES,
    **IMAGES,
    "imdb": Entry(
        task="binary",
        kind="tokens",
        licence="none stated; cite Maas et al. 2011",
        source="Large Movie Review Dataset v1.0 (https://ai.stanford.edu/~amaas/data/sentiment), the last 80 words "
        "of each review, 20,000 words known",
        target_name="sentiment",
        tail=5_000,
        class_names=("negative", "positive"),
        forms=(
            StoredForm(
                files=(
                    File(
                        path="imdb_top20k_len80.npz",
                        size=5503021,
                        sha256="83bc6a3d48781d914c1b8f52f00af45e7e3846e3400cba7437cbea0a37d45ef4",
                    ),
                ),
                read=npz_reviews,
                shapes={"train": (25000, 80), "test": (25000, 80)},
            ),
        ),
    ),
    "physionet2012": Entry(
        task="binary",
        kind="series",
        licence="ODC-By 1.0",
        source="PhysioNet/CinC Challenge 2012 (https://physionet.org/content/challenge-2012): set a trains, "
        "b validates, c tests",
        target_name="in_hospital_death",
        class_names=("survived", "died"),
        forms=(
            StoredForm(
                files=(
                    File(
                        path="physionet2012_set_a.npz",
                        size=3040140,
                        sha256="0c5b398e24352f0a471cc3e666b2e57ec009987eba652a9f3137968c83d9f8a4",
                    ),
                    File(
                        path="physionet2012_set_b.npz",
                        size=2916534,
                        sha256="770a7fafdffecb0e80facb54710673df57e0d0a0a658f4d73e81951df884e960",
                    ),
                    File(
                        path="physionet2012_set_c.npz",
                        size=3193087,
                        sha256="5b38ab6191180c6d7c382b2c23b5ffa18f91311e355690b4f720f6bde38af76c",
                    ),
                ),
                read=physionet.read,
                shapes=dict.fromkeys(("train", "validation", "test"), (4000, 48, 86)),
            ),
        ),
    ),
}

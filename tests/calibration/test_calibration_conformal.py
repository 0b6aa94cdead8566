"""Coverage by simulation, sets and intervals by brute force, refusals."""

import math

import pytest
import scipy.stats
import torch

from dubito import ConfigError, DataError
from dubito.calibration import APS, LAC, QuantileResiduals, ScaledResiduals, SelectiveRisk
from dubito.calibration.abstention import error_bound
from dubito.prediction import BernoulliPrediction, CategoricalPrediction, RealPrediction

TRIALS, CALIBRATION, NEW = 150, 39, 60


def categorical(logits: torch.Tensor) -> CategoricalPrediction:
    none = torch.zeros(len(logits))
    return CategoricalPrediction(logits.log_softmax(1), none, function_variance=none)


def simulated(stream: torch.Generator, count: int, classes: int = 5):
    """Logits of a network that is wrong about its own confidence, and labels."""
    truth = 1.5 * torch.randn(count, classes, generator=stream)
    labels = torch.multinomial(truth.softmax(1), 1, generator=stream).squeeze(1)
    return categorical(3 * truth + 0.5 * torch.randn(count, classes, generator=stream)), labels


def binary(stream: torch.Generator, count: int):
    logits = 2 * torch.randn(count, 1, generator=stream)
    labels = (torch.rand(count, 1, generator=stream) < logits.sigmoid()).long()
    pair = torch.nn.functional.logsigmoid(torch.stack([3 * logits, -3 * logits]))
    none = torch.zeros(count, 1)
    return BernoulliPrediction(pair[0], none, pair[1], function_variance=none), labels


def check_coverage(shares: list[float], level: float, *, exact: bool) -> None:
    """The mean over trials within four standard errors of what split conformal promises."""
    values = torch.tensor(shares, dtype=torch.float64)
    error = float(values.std() / math.sqrt(len(values)))
    promised = math.ceil((CALIBRATION + 1) * level) / (CALIBRATION + 1)
    assert float(values.mean()) > promised - 4 * error
    if exact:  # without ties the share is that of a rank among n + 1
        assert float(values.mean()) < promised + 4 * error


@pytest.mark.parametrize("make", [simulated, binary])
@pytest.mark.parametrize(
    ("rule", "exact"), [(LAC, True), (APS, True), (lambda level: APS(level=level, randomised=False), False)]
)
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_sets_cover_what_they_promise(make, rule, exact, level):
    stream = torch.Generator().manual_seed(0)
    shares = []
    for trial in range(TRIALS):
        own = rule(level=level)
        if isinstance(own, APS) and own.randomised:
            own = APS(level=level, seed=trial)
        fitted = own.fit(*make(stream, CALIBRATION))
        prediction, labels = make(stream, NEW)
        sets = fitted.sets(prediction)
        shares.append(float(sets[torch.arange(NEW), labels.reshape(-1)].double().mean()))
    check_coverage(shares, level, exact=exact)


def test_sets_follow_their_definition():
    stream = torch.Generator().manual_seed(1)
    prediction, labels = simulated(stream, 99)
    probs = prediction.probs.double()
    lac = LAC(level=0.9).fit(prediction, labels)
    scores = (1 - probs[torch.arange(99), labels]).sort().values
    assert torch.equal(lac.sets(prediction), 1 - probs <= scores[89] + 1e-12)  # ⌈100 · 0.9⌉ = 90
    aps = APS(level=0.9, randomised=False).fit(prediction, labels)
    new, _ = simulated(stream, 1000)
    sets = aps.sets(new)
    for row, own in zip(new.probs, sets, strict=True):
        total, expected = 0.0, set()
        for rank, label in enumerate(row.argsort(descending=True).tolist()):
            total += float(row[label])
            if rank == 0 or total <= aps.threshold:
                expected.add(label)
        assert set(own.nonzero().flatten().tolist()) == expected
    assert sets.any(1).all()
    # Harder rows have larger sets: how much so depends on the 99 rows (.32 to .62 in twelve draws of them)
    assert torch.corrcoef(torch.stack([sets.sum(1).float(), new.total]))[0, 1] > 6 / math.sqrt(1000)
    assert torch.equal(APS(seed=3).fit(prediction, labels).sets(new), APS(seed=3).fit(prediction, labels).sets(new))


def real(stream: torch.Generator, count: int, outputs: int = 2, dtype=torch.float32):
    """A mixture of three draws that is too sure, whose noise grows with the inputs."""
    x = torch.randn(count, outputs, generator=stream, dtype=dtype)
    spread = 0.2 + x.abs()
    means = x + 0.3 * torch.randn(3, count, outputs, generator=stream, dtype=dtype)
    noise = torch.randn(count, outputs, generator=stream, dtype=dtype)
    return RealPrediction(means, (0.3 * spread).square().expand(3, -1, -1)), x + spread * noise


@pytest.mark.parametrize("rule", [ScaledResiduals, QuantileResiduals])
@pytest.mark.parametrize("outputs", [1, 2])
def test_intervals_cover_what_they_promise(rule, outputs):
    stream = torch.Generator().manual_seed(2)
    shares = []
    for _ in range(TRIALS):
        fitted = rule(level=0.9).fit(*real(stream, CALIBRATION, outputs))
        assert len(fitted.thresholds) == outputs and fitted.num_data == CALIBRATION
        prediction, targets = real(stream, NEW, outputs)
        lower, upper = fitted.intervals(prediction)
        assert (lower <= upper).all() and lower.shape == targets.shape
        shares.append(((lower <= targets) & (targets <= upper)).double().mean(0))
    for output in range(outputs):
        check_coverage([float(share[output]) for share in shares], 0.9, exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_intervals_follow_their_definition(dtype):
    prediction, targets = real(torch.Generator().manual_seed(3), 99, 1, dtype)
    scaled = ScaledResiduals(level=0.9).fit(prediction, targets)
    scores = ((targets - prediction.mean).abs() / prediction.std)[:, 0].sort().values
    assert scaled.thresholds[0] == pytest.approx(float(scores[89]))
    lower, upper = scaled.intervals(prediction)
    torch.testing.assert_close(upper - lower, 2 * scaled.thresholds[0] * prediction.std)
    wide = RealPrediction(prediction.means, 100 * prediction.variances)  # far too unsure: intervals shrink
    rule = QuantileResiduals(level=0.9).fit(wide, targets)
    assert rule.thresholds[0] < 0
    lower, upper = rule.intervals(wide)
    inside = ((lower <= targets) & (targets <= upper)).sum()
    assert lower.dtype == dtype and inside in (89, 90)  # the row at the threshold may fall to rounding
    narrow = RealPrediction(prediction.means[:1], 1e-6 * prediction.variances[:1])
    lower, upper = rule.intervals(narrow)  # turned inside out: the middle alone
    torch.testing.assert_close(lower, upper)


def test_refusals():
    prediction, labels = simulated(torch.Generator().manual_seed(0), 19)
    LAC(level=0.95).fit(prediction, labels)  # ⌈20 · 0.95⌉ = 19, the last row
    with pytest.raises(DataError, match="at least 19 calibration rows, got 18"):
        LAC(level=0.95).fit(prediction[:18], labels[:18])
    with pytest.raises(DataError, match="from 0 to 4, got"):
        LAC(level=0.5).fit(prediction, labels + 3)
    with pytest.raises(DataError, match="one class number"):
        APS(level=0.5).fit(prediction, labels[:5])
    with pytest.raises(DataError, match="one class per row"):
        LAC().fit(categorical(torch.zeros(9, 3, 4)), labels)
    with pytest.raises(DataError, match="classes have sets"):
        ScaledResiduals().fit(prediction, labels)
    with pytest.raises(ConfigError, match="level must be"):
        APS(level=1.0)
    values, targets = real(torch.Generator().manual_seed(0), 30, 2)
    rule = ScaledResiduals().fit(values, targets)
    with pytest.raises(DataError, match="2 outputs of a row, got 1"):
        rule.intervals(real(torch.Generator().manual_seed(0), 30, 1)[0])


@pytest.mark.parametrize(("errors", "count"), [(0, 10), (3, 50), (40, 41), (200, 10_000), (7, 7)])
def test_the_bound_is_that_of_clopper_and_pearson(errors, count):
    expected = scipy.stats.beta.ppf(1 - 0.01, errors + 1, count - errors) if errors < count else 1.0
    assert error_bound(errors, count, 0.01) == pytest.approx(expected, rel=1e-9)


def test_answered_rows_keep_the_promise():
    stream = torch.Generator().manual_seed(4)

    def drawn(count: int):
        uncertainty = torch.rand(count, generator=stream)
        return uncertainty, torch.rand(count, generator=stream) > 0.5 * uncertainty**2

    broken, coverage = 0, []
    rule = SelectiveRisk(risk=0.05, delta=0.1)
    for _ in range(200):
        fitted = rule.fit(*drawn(1000))
        if fitted.threshold > -math.inf:
            # the true risk below a threshold t is ∫ u²/2 / t = t² / 6
            broken += fitted.threshold**2 / 6 > 0.05
            assert fitted.bound <= 0.05 and fitted.risk <= fitted.bound
        coverage.append(fitted.coverage)
    assert broken <= 0.1 * 200 + 4 * math.sqrt(200 * 0.1 * 0.9)
    assert 0.3 < sum(coverage) / 200 < math.sqrt(0.3)  # the best possible is √(6 · 0.05)
    answered = fitted.answered(torch.tensor([0.0, 1.0]))
    assert answered.tolist() == [True, False]


def test_abstention_handles_ties_and_hopeless_cases():
    uncertainty = torch.tensor([0.1] * 50 + [0.9] * 50)
    right = torch.tensor([True] * 50 + [False] * 50)
    fitted = SelectiveRisk(risk=0.2).fit(uncertainty, right)
    assert fitted.coverage == 0.5 and fitted.threshold == pytest.approx(0.1)
    none = SelectiveRisk(risk=0.01).fit(uncertainty, ~right)
    assert none.coverage == 0 and not none.answered(uncertainty).any()
    with pytest.raises(DataError, match="booleans"):
        SelectiveRisk().fit(uncertainty, right.long())

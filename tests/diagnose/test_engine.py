"""Causes from literal evidence: what is told from what, without a training."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from nanny.core.examination import Examination, FirstBad, GradientError, Hazard, Place
from nanny.core.finding import Finding, NannyError, Severity
from nanny.core.step import OptimizerState, StepRecord, Update
from nanny.diagnose.causes.early import crossing
from nanny.diagnose.choose import diagnoses_of
from nanny.diagnose.evidence import Evidence, GradientLevel, Reach, RunFacts
from nanny.diagnose.history import RunHistory
from nanny.diagnose.knowledge import LANGUAGES, confirm_of, remedy_of
from nanny.diagnose.registry import all_causes
from nanny.diagnose.run import diagnose, evidence_of
from nanny.store.encode import dataclass_of, from_json, to_json

FFN = Place("blocks.2.ffn", "FeedForward", "forward", "train.py", 12)


def curve(values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(len(values)), np.array(values, dtype=np.float64)


def overflow_exam(step: int = 3, place: Place = FFN, op: str = "addmm", in_fp32: bool = False, **more) -> Examination:
    first = FirstBad(op, place, 10, False, {"absmax": 900.0}, None if in_fp32 else 90_000.0)
    return Examination(
        step=step,
        amp_dtype="float16",
        loss=math.nan,
        first_bad=first,
        first_bad_reference=first if in_fp32 else None,
        gradients=(GradientError("w", math.nan, 1.0, math.nan, 1.0, 0.0, 0.0, nonfinite=True),),
        **more,
    )


def broken_run(exam: Examination, steps: int = 10, **more) -> Evidence:
    """A run under a GradScaler whose loss is NaN from the examined step on."""
    incident = StepRecord(step=exam.step, loss=math.nan, scale=1024.0, skipped=True, bad_grads=("w",), nan_grads=True)
    bad = [s >= exam.step for s in range(steps)]
    scalars = {
        "loss": curve([math.nan if b else 1.0 for b in bad]),
        "scale": curve([1024.0] * steps),
        "skipped": curve([float(b) for b in bad]),
        "grad_norm": curve([math.nan if b else 1.0 for b in bad]),
    }
    latest, counts = StepRecord(0, amp_dtype="float16"), {"scale": steps}
    facts = RunFacts(steps=steps, incidents=(incident,), bad_steps=sum(bad), latest=latest, counts=counts, **more)
    return Evidence(facts, scalars, examinations=(exam,))


def test_no_evidence_is_no_diagnosis():
    assert diagnoses_of(Evidence(RunFacts())) == []


def test_a_layer_beyond_the_range_of_fp16_is_told_with_its_numbers_and_its_line():
    (best,) = diagnoses_of(broken_run(overflow_exam()))
    assert (best.cause, best.family, best.culprit, best.step) == ("activation_overflow_fp16", "overflow", "blocks.2.ffn", 3)
    assert best.precision_caused is True
    assert best.where == "train.py:12"
    assert any("90,000" in fact and "65,504" in fact for fact in best.evidence)
    assert best.remedy
    assert best.confirm
    assert best.chain[0].startswith("blocks.2.ffn")


@pytest.mark.parametrize(
    ("op", "place", "cause", "culprit"),
    [
        ("exp", Place(phase="loop"), "exp_overflow_fp16", "op:exp"),
        ("sum", Place("readout"), "reduction_overflow_fp16", "readout"),
        ("mul", Place(phase="loop"), "product_overflow_fp16", "op:mul"),
        ("add", Place("blocks.1"), "activation_overflow_fp16", "blocks.1"),
    ],
)
def test_the_operation_that_overflows_decides_between_the_causes(op, place, cause, culprit):
    (best,) = diagnoses_of(broken_run(overflow_exam(op=op, place=place)))
    assert (best.cause, best.culprit) == (cause, culprit)


def test_what_breaks_backward_in_fp32_too_is_a_singular_gradient():
    exam = overflow_exam(op="sqrt_backward", place=Place("norm", phase="backward"), in_fp32=True)
    evidence = broken_run(replace(exam, loss=0.5))
    evidence = replace(evidence, scalars={**evidence.scalars, "loss": curve([0.5] * 10)})
    (best,) = diagnoses_of(evidence)
    assert (best.cause, best.culprit, best.precision_caused) == ("singular_gradient", "norm", False)


def test_a_loss_scale_that_is_still_being_searched_is_healthy():
    skipped = StepRecord(step=0, loss=1.0, scale=2.0**16, skipped=True, bad_grads=("w",))
    incidents = tuple(replace(skipped, step=s, scale=2.0 ** (16 - s)) for s in range(4))
    scalars = {
        "loss": curve([1.0 - 0.05 * s for s in range(12)]),
        "scale": curve([2.0 ** max(16 - s, 12) for s in range(12)]),
        "skipped": curve([1.0] * 4 + [0.0] * 8),
        "grad_norm": curve([math.inf] * 4 + [1.0] * 8),
    }
    assert diagnoses_of(Evidence(RunFacts(steps=12, incidents=incidents, bad_steps=4, counts={"scale": 12}), scalars)) == []


def test_growth_before_the_overflow_is_a_learning_rate_not_a_format():
    evidence = broken_run(overflow_exam(step=8), steps=12)
    grows = [1.0, 1.1, 2.0, 9.0, 60.0, 400.0, 3e3, 2e4] + [math.nan] * 4
    norms = [1.0, 1.5, 4.0, 20.0, 150.0, 900.0, 8e3, 5e4] + [math.nan] * 4
    rates = [0.01, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.2, 0.1, 0.05]
    told = {**evidence.scalars, "loss": curve(grows), "grad_norm": curve(norms), "lr": curve(rates)}
    best = diagnoses_of(replace(evidence, scalars=told))[0]
    assert (best.cause, best.culprit, best.precision_caused) == ("lr_too_high", "optimizer.lr", False)
    assert "learning rate 0.5" in best.evidence  # while it grew, not what a schedule has left of it


def test_a_run_away_that_precision_began_is_not_blamed_on_the_learning_rate():
    wrong = Examination(step=1, amp_dtype="float16", loss=1.0, gradient_error=0.8)
    evidence = broken_run(overflow_exam(step=8), steps=12)
    grows = [1.0, 1.1, 2.0, 9.0, 60.0, 400.0, 3e3, 2e4] + [math.nan] * 4
    evidence = replace(
        evidence,
        scalars={**evidence.scalars, "loss": curve(grows), "grad_norm": curve(grows)},
        examinations=(wrong, *evidence.examinations),
    )
    assert diagnoses_of(evidence)[0].cause == "activation_overflow_fp16"


def hazard(cause: str, consequence: float, order: int = 5, site: str = "norm", **more) -> Hazard:
    numbers = {"consequence": consequence, "cause": cause, "message": "seen"}
    return Hazard("cancellation", "sub", Place(site), order, "bfloat16", **numbers, **more)


def silent(*hazards: Hazard, steps: int = 3) -> Evidence:
    exams = tuple(Examination(s, amp_dtype="bfloat16", loss=1.0, gradient_error=0.4, hazards=hazards) for s in range(steps))
    return Evidence(
        RunFacts(steps=steps, latest=StepRecord(0, amp_dtype="bfloat16")), {"loss": curve([1.0] * steps)}, examinations=exams
    )


def test_a_silent_hazard_is_told_once_for_all_examined_steps():
    (best,) = diagnoses_of(silent(hazard("catastrophic_cancellation", 0.4)))
    assert (best.cause, best.culprit, best.precision_caused) == ("catastrophic_cancellation", "norm", True)
    assert any("3 of 3 examined steps" in fact for fact in best.evidence)


def test_of_several_hazards_the_earliest_that_does_most_harm_comes_first():
    late = hazard("scale_imbalance_absorption", 0.5, order=40, site="head")
    early = hazard("integer_in_low_precision", 0.45, order=2, site="embed")
    tiny = hazard("residual_absorption", 0.03, order=1, site="blocks.0")
    best = diagnoses_of(silent(tiny, early, late))[0]
    assert (best.cause, best.culprit) == ("integer_in_low_precision", "embed")


@pytest.mark.parametrize(
    ("falls", "otherwise", "seen_at", "told"),
    [(0.8, 0.01, [2], 0), (0.8, 0.3, [2], 1), (0.8, 0.01, [7], 1), (0.8, 0.01, [2, 3, 4, 5], 1), (1.0, 0.01, [2], 1)],
)
def test_what_was_constant_for_a_while_is_no_fault_of_a_run_that_learns(
    falls: float, otherwise: float, seen_at: list[int], told: int
):
    wrong = replace(hazard("scale_imbalance_absorption", 0.3), kind="absorption", op="mul")
    losses = [falls**s for s in range(8)]
    exams = tuple(
        Examination(s, amp_dtype="bfloat16", loss=losses[s], gradient_error=0.3, hazards=(wrong,))
        if s in seen_at
        else Examination(s, amp_dtype="bfloat16", loss=losses[s], gradient_error=otherwise)
        for s in range(8)
    )
    assert len(diagnoses_of(Evidence(RunFacts(steps=8), {"loss": curve(losses)}, examinations=exams))) == told


def test_a_hazard_of_the_fp32_twin_is_not_precision():
    (best,) = diagnoses_of(silent(hazard("catastrophic_cancellation", 0.4, in_reference=True)))
    assert best.precision_caused is False


def test_clipping_scaled_gradients_is_told_with_the_order_of_calls():
    finding = Finding("CLIP_BEFORE_UNSCALE", Severity.ERROR, "clipped to 1 while scaled by 65536", site="scaler", step=0)
    latest = StepRecord(3, calls=("scale", "backward", "clip", "scaler.step", "update"))
    facts = RunFacts(steps=4, counts={"clipped": 4, "clipped_scaled": 4}, latest=latest)
    scalars = {"grad_norm": curve([2.0] * 4), "scale": curve([65536.0] * 4), "clip": curve([1.0] * 4), "loss": curve([1.0] * 4)}
    (best,) = diagnoses_of(Evidence(facts, scalars, findings=(finding,)))
    assert (best.cause, best.culprit) == ("clip_before_unscale", "loop:clip")
    assert any("backward -> clip" in fact for fact in best.evidence)


def test_poisoned_running_statistics_of_a_run_that_trains_on_are_the_cause():
    incident = StepRecord(step=5, loss=math.nan, skipped=True, bad_grads=("w",), nan_grads=True)
    facts = RunFacts(steps=20, bad_steps=1, incidents=(incident,), bad_buffers=("stem.1.running_var",), bad_buffers_step=5)
    scalars = {"loss": curve([1.0] * 20), "skipped": curve([float(s == 5) for s in range(20)]), "scale": curve([1024.0] * 20)}
    best = diagnoses_of(Evidence(facts, scalars))[0]
    assert (best.cause, best.culprit, best.step) == ("bn_stats_poisoned", "stem.1", 5)


def test_lost_updates_need_most_probed_steps_and_an_ordinary_optimizer():
    update = Update("w", "bfloat16", 1e-5, 1000, 990, 1e-7, 0.1)
    optimizer = OptimizerState("AdamW", True, False, 1e-5, param_dtype="bfloat16")
    facts = RunFacts(
        steps=9, probes=4, lost_probes=4, updates=(update,), updates_step=8, latest=StepRecord(8, optimizers=(optimizer,))
    )
    (best,) = diagnoses_of(Evidence(facts))
    assert (best.cause, best.culprit) == ("update_lost", "w")
    assert any("99 %" in fact for fact in best.evidence)
    assert diagnoses_of(Evidence(replace(facts, lost_probes=1))) == []
    stochastic = replace(optimizer, rounds_to_nearest=False)
    assert diagnoses_of(Evidence(replace(facts, latest=StepRecord(8, optimizers=(stochastic,))))) == []


def test_a_steady_rise_towards_the_end_of_fp16_is_an_early_warning_with_its_step():
    reach = tuple(Reach(100 * i, "blocks.3.ffn", 8000 * 1.3**i) for i in range(8))
    (best,) = diagnoses_of(Evidence(RunFacts(steps=700, reach=reach, latest=StepRecord(0, amp_dtype="float16"))))
    assert (best.cause, best.culprit, best.early) == ("activation_overflow_fp16", "blocks.3.ffn", True)
    assert best.expected_step is not None
    assert 700 < best.expected_step < 1000


def test_noise_is_no_trend():
    values = [9000.0, 30000.0, 8000.0, 26000.0, 9500.0, 31000.0]
    assert crossing(list(zip(range(0, 600, 100), values)), 65504.0, 5, 0.9) is None
    assert crossing([(0, 1.0), (100, 2.0), (200, 4.0)], 65504.0, 5, 0.9) is None  # too few points


def test_steps_are_folded_into_facts_of_the_loop():
    history = RunHistory()
    calls = ("zero_grad", "scale", "backward", "scaler.step", "update")
    for s in range(3):
        step = StepRecord(s, loss=1.0, scale=8.0, stepped=True, calls=calls, new_scaler=True)
        history.add(replace(step, backwards=2, loss_factor=4.0))
    facts = history.evidence(()).facts
    assert (facts.steps, facts.count("stepped"), facts.count("new_scaler")) == (3, 3, 3)
    assert (facts.largest["backwards"], facts.largest["loss_factor"]) == (2, 4.0)
    assert facts.latest.calls == calls
    assert list(history.evidence(()).curve("loss")[1]) == [1.0, 1.0, 1.0]


def test_every_field_of_a_step_is_kept_by_the_run_and_survives_the_store():
    told = {
        "growth_interval": 2000,
        "root_site": "Net",
        "stale": ("w",),
        "optimizers": (OptimizerState("SGD", True, False, 0.1),),
    }
    history = RunHistory()
    history.add(StepRecord(4, **told))
    history.add(StepRecord(5))
    facts = dataclass_of(RunFacts, from_json(to_json(asdict(history.facts))))
    assert {name: getattr(facts.latest, name) for name in told} == told == {name: getattr(facts.first, name) for name in told}
    assert (facts.count("stale"), facts.first_steps["stale"], facts.largest["growth_interval"]) == (1, 4, 2000)
    assert facts == history.facts


@pytest.mark.parametrize("called", ["weight", "bias", "theta"])
def test_gradients_that_fade_are_told_whatever_the_parameters_are_called(called):
    names = tuple(f"layers.{i}.{called}" for i in range(9))
    levels = tuple(GradientLevel(name, 10.0 ** (i - 9), 1.0) for i, name in enumerate(names))
    facts = RunFacts(steps=8, parameters=names, sizes=dict.fromkeys(names, 64), levels=levels)
    (best,) = diagnoses_of(Evidence(facts, {"loss": curve([1.0] * 8)}))
    assert (best.cause, best.culprit) == ("vanishing_architecture", "layers.0")
    assert diagnoses_of(Evidence(replace(facts, vectors=names), {"loss": curve([1.0] * 8)})) == []  # biases, gains


def test_every_cause_says_what_to_change_and_how_to_prove_it():
    for cause in all_causes().values():
        assert all(remedy_of(cause.name, language) for language in LANGUAGES), cause.name
        assert all(confirm_of(cause.name, language) for language in LANGUAGES), cause.name


def test_a_diagnosis_has_its_remedy_in_both_languages():
    (best,) = diagnoses_of(broken_run(overflow_exam()))
    assert best.remedy == remedy_of("activation_overflow_fp16")
    assert best.in_language("zh").remedy == remedy_of("activation_overflow_fp16", "zh") != best.remedy


def test_every_cause_has_a_page():
    from nanny.show.pages import all_pages

    pages = {code.lower() for code in all_pages()}
    missing = set(all_causes()) - pages
    assert missing == set()


def test_what_cannot_be_read_is_refused_with_a_sentence():
    with pytest.raises(NannyError, match="MixedPrecisionNanny"):
        diagnose(42)
    assert evidence_of(Evidence(RunFacts(steps=7))).facts.steps == 7

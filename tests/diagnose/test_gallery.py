"""The gallery under the monitor with its defaults: a quick part of it here, all of it in `make test-all` and `make bench`."""

from __future__ import annotations

import gallery
import pytest
from gallery import Case

CASES = {case.name: case for case in gallery.all_cases()}
QUICK = (
    "balances_in_dollars",
    "box_area_in_pixels",
    "dice_of_a_large_picture",
    "vae_kl_of_raw_pixels",
    "clip_norm_in_half",
    "scale_restored_from_a_crashed_run",
    "noisy_or_of_forty_tiles",
    "codebook",
    "kelvin",
    "popular_items",
    "recalibrate",
    "shipped_average",
    "model_half_with_adam",
    "large_eps_taken_from_a_recipe",
    "scaler_made_anew_each_step",
    "value_clip_before_unscale",
    "gradients_kept_after_a_skipped_step",
    "hot_convnet",
    "broken_sensor",
    "raw_pixels",
    "cold_attention",
)


@pytest.mark.parametrize("name", QUICK)
def test_the_planted_cause_is_named_and_its_repaired_twin_is_healthy(name):
    case = CASES[name]
    best = gallery.diagnosed(case)[0]
    assert best.cause == case.cause
    assert best.culprit in case.culprits
    assert best.precision_caused == case.precision_caused
    assert any(char.isdigit() for fact in best.evidence for char in fact)
    assert gallery.diagnosed(CASES[f"{name}_fixed"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES.values() if not c.cause], ids=str)
def test_a_healthy_training_has_no_diagnosis(case: Case):
    assert gallery.diagnosed(case) == []

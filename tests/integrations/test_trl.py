"""TRL's trainers are the transformers Trainer underneath: the same callback, the same answers, with the real package."""

from __future__ import annotations

import pytest
from training import scalar

from .test_frameworks import OPTIONS, program, watched_by_itself, weights_alone

pytestmark = pytest.mark.slow
CAUSES = {
    "overflow": ("activation_overflow_fp16", "model.layers.1.mlp.up_proj"),
    "clip": ("clip_before_unscale", "loop:clip"),
    "lost": ("update_lost", ""),
    "lr": ("lr_too_high", "optimizer.lr"),
}


def watched(name, folder, fault):
    from nanny.integrations.transformers import NannyCallback

    callback = NannyCallback(output_dir=folder, **OPTIONS)
    model = program(name).train(fault, callbacks=[callback])
    return callback.nanny, model


@pytest.mark.parametrize("fault", [*CAUSES, "no-overflow", "no-lost"])
@pytest.mark.parametrize("way", [watched, watched_by_itself])
def test_a_fault_in_sft_is_named_its_twin_is_not_and_the_weights_are_those_of_the_training_alone(way, fault, tmp_path):
    pytest.importorskip("trl")
    from task import STEPS, fingerprint

    nanny, model = way("trl_sft", tmp_path, fault)
    if fault in CAUSES:
        cause, culprit = CAUSES[fault]
        best = nanny.diagnoses()[0]
        assert best.cause == cause
        assert best.culprit.startswith(culprit)
    else:
        assert nanny.verdict("finished").word == "HEALTHY"
    assert list(scalar(tmp_path, "loss")) == list(range(STEPS))
    assert fingerprint(model) == weights_alone("trl_sft", fault)

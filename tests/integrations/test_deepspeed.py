"""With the real package, where it is installed: on a CPU it has no fp16, so bf16 is asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from training import recorded, scalar

pytestmark = pytest.mark.slow
sys.path.insert(0, str(Path(__file__).parent / "programs"))


@pytest.mark.parametrize(("fault", "cause"), [("lr", "lr_too_high"), ("data", "data_nan"), ("no-lost", None)])
def test_an_engine_is_watched_like_the_loop_that_it_replaces(fault, cause, tmp_path):
    pytest.importorskip("deepspeed")
    import deepspeed_engine
    from task import STEPS, fingerprint

    from nanny.integrations.deepspeed import watch

    alone = fingerprint(deepspeed_engine.train(fault))
    seen, engines = [], []

    def of_engine(engine):
        engines.append(engine)
        seen.append(watch(engine, output_dir=tmp_path, live=False, strict=True))
        return seen[0]

    assert fingerprint(deepspeed_engine.train(fault, watch=of_engine)) == alone
    assert [best.cause for best in seen[0].diagnoses()[:1]] == ([cause] if cause else [])
    told, taken = list(scalar(tmp_path, "loss")), STEPS - engines[0].skipped_steps
    assert told in (list(range(taken)), list(range(taken + 1)))  # those that it refuses are told with the next, or at the end
    assert "blocks.1.up.weight" in recorded(tmp_path, "grad", 0)

"""The same tiny training in every framework, watched from outside (as `nanny run` does) and by its integration: both see the same
steps, the real loss, gradients unscaled and before clipping; planted faults are named, healthy twins are not, weights stay."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from runs.query_recordings import nanny as run_nanny
from training import recorded, scalar

from nanny import MixedPrecisionNanny

sys.path.insert(0, str(Path(__file__).parent / "programs"))

OPTIONS: dict[str, Any] = {"live": False, "strict": True}
FRAMEWORKS = ("trainer", "lightning_fit", "fabric", "accelerated")
LOOPS = ("plain", "recipe")
CAUSES = {
    "overflow": ("activation_overflow_fp16", "blocks.1.up"),
    "clip": ("clip_before_unscale", "loop:clip"),
    "lost": ("update_lost", ""),
    "lr": ("lr_too_high", "optimizer.lr"),
    "data": ("data_nan", "data:input"),
}


def program(name: str) -> Any:
    if "accelerate" in sys.modules:  # it is set up once per process
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return importlib.import_module(name)


@functools.cache
def weights_alone(name: str, fault: str) -> str:
    from task import fingerprint

    return fingerprint(program(name).train(fault))


def watched_by_itself(name: str, folder: Path, fault: str, **more: Any) -> tuple[MixedPrecisionNanny, Any]:
    nanny = MixedPrecisionNanny(None, output_dir=folder, **OPTIONS)
    nanny.steps_by_themselves(find_models=True, first=None)
    try:
        return nanny, program(name).train(fault, **more)
    finally:
        nanny.close()


def watched_by_its_integration(name: str, folder: Path, fault: str, **more: Any) -> tuple[MixedPrecisionNanny, Any]:
    options = {"output_dir": folder, **OPTIONS}
    if name in ("trainer", "lightning_fit"):
        home = {"trainer": "transformers", "lightning_fit": "lightning"}[name]
        callback = importlib.import_module(f"nanny.integrations.{home}").NannyCallback(**options)
        model = program(name).train(fault, callbacks=[callback], **more)
        return callback.nanny, model
    seen = []

    def watch(framework: Any, model: Any, optimizer: Any) -> MixedPrecisionNanny:
        if name == "fabric":
            from nanny.integrations.lightning import watch as watch_models

            seen.append(watch_models(model, **options))
        else:
            from nanny.integrations.accelerate import watch as watch_prepared

            seen.append(watch_prepared(framework, **options))
        return seen[0]

    model = program(name).train(fault, watch=watch, **more)
    return seen[0], model


WAYS = [pytest.param((watched_by_itself, name), id=f"{name}-by-itself") for name in (*LOOPS, *FRAMEWORKS)]
WAYS += [pytest.param((watched_by_its_integration, name), id=f"{name}-integration") for name in FRAMEWORKS]


@pytest.mark.slow
@pytest.mark.parametrize("fault", CAUSES)
@pytest.mark.parametrize("way", WAYS)
def test_a_planted_fault_is_named_and_the_weights_are_those_of_the_training_alone(way, fault, tmp_path):
    from task import fingerprint

    watch, name = way
    nanny, model = watch(name, tmp_path, fault)
    cause, culprit = CAUSES[fault]
    best = nanny.diagnoses()[0]
    assert best.cause == cause
    assert best.culprit.removeprefix("net.").startswith(culprit)
    assert nanny.verdict("finished").word == "NOT HEALTHY"
    assert fingerprint(model) == weights_alone(name, fault)


@pytest.mark.slow
@pytest.mark.parametrize("twin", ["no-overflow", "no-lost", "no-skip"])
@pytest.mark.parametrize("way", WAYS)
def test_a_healthy_twin_is_silent_and_its_numbers_are_those_of_a_plain_loop(way, twin, tmp_path):
    from task import STEPS, fingerprint

    watch, name = way
    nanny, model = watch(name, tmp_path / "run", twin)
    assert nanny.verdict("finished").word == "HEALTHY"
    assert list(scalar(tmp_path / "run", "loss")) == list(range(STEPS))  # also those that a GradScaler skips
    scales = list(scalar(tmp_path / "run", "scale").values())
    assert (min(scales, default=1.0) < max(scales, default=1.0)) == (twin == "no-skip")
    assert fingerprint(model) == weights_alone(name, twin)
    watched_by_itself("plain", tmp_path / "plain", twin)
    for curve in ("loss", "grad_norm", "lr", "clip", "scale"):
        here, there = scalar(tmp_path / "run", curve), scalar(tmp_path / "plain", curve)
        assert list(here) == list(there)
        near = 0.05 if name == "fabric" else 1e-6  # Fabric rounds inputs and labels to 16 bits first
        assert list(here.values()) == pytest.approx(list(there.values()), rel=near, nan_ok=True)  # skipped
    prefix = "net." if name == "lightning_fit" else ""
    assert set(recorded(tmp_path / "run", "grad", 0)) == {prefix + n for n in recorded(tmp_path / "plain", "grad", 0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("plain", "lr"),
        ("recipe", "lost"),
        ("trainer", "overflow"),
        ("lightning_fit", "data"),
        ("fabric", "clip"),
        ("accelerated", "lr"),
    ],
)
def test_nanny_run_of_the_unchanged_script_says_the_same(name, fault, tmp_path):
    script = Path(__file__).parent / "programs" / f"{name}.py"
    for case in (fault, "no-skip"):
        done = run_nanny("run", "--output-dir", case, script, case, cwd=tmp_path)
        assert f"weights {weights_alone(name, case)}" in done.stdout
        said = json.loads(run_nanny("summary", "--db", case, "--format", "json", cwd=tmp_path).stdout)
        assert said["healthy"] == (case != fault)
        assert case != fault or f"{CAUSES[fault][0]} in" in said["verdict"]


@pytest.mark.slow
def test_the_steps_of_a_resumed_trainer_go_on(tmp_path):
    watched_by_its_integration("trainer", tmp_path / "first", "no-lost", steps=4, saves_in=str(tmp_path / "saved"), save_steps=4)
    watched_by_its_integration("trainer", tmp_path / "run", "no-lost", steps=7, saves_in=str(tmp_path / "saved"), resume=True)
    assert list(scalar(tmp_path / "run", "loss")) == [4, 5, 6]


@pytest.mark.slow
def test_the_steps_of_a_resumed_lightning_training_go_on(tmp_path):
    saved = str(tmp_path / "last.ckpt")
    watched_by_its_integration("lightning_fit", tmp_path / "first", "no-lost", steps=4, saves_in=str(tmp_path), save=True)
    watched_by_its_integration("lightning_fit", tmp_path / "run", "no-lost", steps=7, saves_in=str(tmp_path), resume=saved)
    assert list(scalar(tmp_path / "run", "loss")) == [4, 5, 6]


@pytest.mark.slow
def test_the_real_loss_of_a_trainer_that_logs_nan_as_zero(tmp_path):
    watched_by_its_integration("trainer", tmp_path, "overflow", steps=3)
    assert all(loss != loss for loss in scalar(tmp_path, "loss").values())
    assert len(scalar(tmp_path, "loss")) == 3

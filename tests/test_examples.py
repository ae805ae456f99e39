"""The examples do what their first lines promise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs.query_recordings import nanny

EXAMPLES = Path(__file__).parent.parent / "examples"
PAGES = {  # of where people train, in both languages
    "integrations": (
        "trainer_callback",
        "trl_sft",
        "lightning_callback",
        "fabric_loop",
        "accelerate_loop",
        "deepspeed_engine",
        "gan_loop",
    ),
    "distributed": ("ddp", "fsdp", "tensor_parallel", "pipeline"),
    "compile": ("compiled",),
}


@pytest.mark.parametrize("page", PAGES)
def test_every_place_where_people_train_has_a_page_and_a_short_example(page):
    for language in (".md", ".zh-CN.md"):
        text = (EXAMPLES.parent / "docs" / f"{page}{language}").read_text()
        assert [name for name in PAGES[page] if f"](../examples/{name}.py)" not in text] == []
    assert {name: n for name in PAGES[page] if (n := len((EXAMPLES / f"{name}.py").read_text().splitlines())) > 40} == {}


@pytest.mark.slow
def test_unscaled_attention_is_diagnosed_down_to_its_line(tmp_path):
    script = shutil.copy(EXAMPLES / "unscaled_attention.py", tmp_path)
    assert nanny("run", script, cwd=tmp_path).returncode == 0
    answer = nanny("diagnose", "--format", "json", cwd=tmp_path)
    first = json.loads(answer.stdout)[0]
    line = 1 + Path(script).read_text().splitlines().index("        scores = q @ k.transpose(-1, -2)")
    assert first["cause"] == "attention_logit_overflow_fp16"
    assert first["culprit"] in ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")
    assert first["where"].endswith(f"unscaled_attention.py:{line}")
    assert first["precision_caused"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "causes", "culprits", "precision"),
    [
        ("vanishing_gradients", ("grad_underflow_no_scaling",), ("0.weight", "2.weight", "4.weight"), True),
        ("lost_updates", ("update_lost",), ("0.weight",), True),
        ("clipped_too_early", ("clip_before_unscale",), ("loop:clip",), True),
        ("squared_norm", ("norm_square_overflow_fp16",), ("unit",), True),
        ("lost_digits", ("catastrophic_cancellation", "scale_imbalance_absorption"), ("0", "2"), True),
        ("learning_rate", ("lr_too_high",), ("optimizer.lr",), False),
        ("bad_record", ("data_nan",), ("data:input",), False),
        ("empty_row", ("mask_inf_full_row",), ("attention", "op:softmax"), False),
        ("forgotten_zero_grad", ("gradient_never_cleared",), ("optimizer",), False),
        ("new_head", ("in_no_optimizer",), ("head.weight",), False),
        ("sleeping_dropout", ("mode_mismatch",), ("2",), False),
    ],
)
def test_an_example_is_diagnosed_and_its_fix_is_healthy(example, causes, culprits, precision, tmp_path):
    script = shutil.copy(EXAMPLES / f"{example}.py", tmp_path)
    assert len(Path(script).read_text().splitlines()) < 60
    assert nanny("run", script, cwd=tmp_path).returncode == 0
    first = json.loads(nanny("diagnose", "--format", "json", cwd=tmp_path).stdout)[0]
    assert first["cause"] in causes
    assert first["culprit"] in culprits
    assert (first["precision_caused"] is True) == precision
    assert nanny("run", script, "--fixed", cwd=tmp_path).returncode == 0
    assert json.loads(nanny("summary", "--format", "json", cwd=tmp_path).stdout)["healthy"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "cause", "culprit"),
    [
        ("trainer_callback.py", "activation_overflow_fp16", "encode"),
        ("lightning_callback.py", "update_lost", "net.0.weight"),
        ("accelerate_loop.py", "data_nan", "data:input"),
        ("fabric_loop.py", "lr_too_high", "optimizer.lr"),
        ("trl_sft.py", "lr_too_high", "optimizer.lr"),
        ("gan_loop.py", "lr_too_high", "optimizer.lr"),
    ],
)
def test_the_example_of_a_framework_is_diagnosed_and_its_fix_is_healthy(example, cause, culprit, tmp_path):
    if example.startswith("trl"):
        pytest.importorskip("trl")
    command = [sys.executable, shutil.copy(EXAMPLES / example, tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].startswith(f"NOT HEALTHY: {cause} in {culprit}")
    first = json.loads(nanny("diagnose", "--format", "json", cwd=tmp_path).stdout)[0]
    assert (first["cause"], first["culprit"]) == (cause, culprit)
    done = subprocess.run([*command, "--fixed"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].startswith("HEALTHY")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "cause", "options"),
    [
        ("ddp.py", "data_nan", []),
        ("fsdp.py", "reduce_dtype_low_precision", ["--trace-interval", "5"]),
        ("tensor_parallel.py", "activation_overflow_fp16", []),
        ("pipeline.py", "data_nan", []),
    ],
)
def test_the_example_of_many_processes_is_diagnosed_and_its_fix_is_healthy(example, cause, options, tmp_path):
    words = ["--standalone", "--nproc-per-node", "2", "-m", "nanny", "run", *options]
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(EXAMPLES / example)]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    first = json.loads(nanny("diagnose", "--format", "json", cwd=tmp_path).stdout)[0]
    assert first["cause"] == cause
    assert subprocess.run([*command, "--fixed"], cwd=tmp_path).returncode == 0
    assert json.loads(nanny("summary", "--format", "json", cwd=tmp_path).stdout)["healthy"] is True


@pytest.mark.slow
def test_the_example_of_deepspeed_is_diagnosed(tmp_path):
    pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run([*command, str(EXAMPLES / "deepspeed_engine.py")], cwd=tmp_path, capture_output=True, text=True)
    assert "NOT HEALTHY: data_nan in data:input at step 11" in done.stdout

"""CONFIG_* rules on DeepSpeed, Accelerate, Trainer and Lightning files, and silence on everything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanny import check_model
from nanny.check.files import check_paths
from nanny.core.finding import Severity

HEALTHY_DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
}  # fmt: skip


def of_json(tmp_path: Path, data: object) -> list[tuple[str, str]]:
    (tmp_path / "settings.json").write_text(json.dumps(data, indent=2))
    return [(f.code, f.evidence["key"]) for f in check_model(tmp_path)]


def of_yaml(tmp_path: Path, text: str) -> list[tuple[str, int | None]]:
    (tmp_path / "settings.yaml").write_text(text)
    return [(f.code, f.line) for f in check_model(tmp_path)]


def deepspeed(**changes: object) -> dict[str, object]:
    return {"train_batch_size": 8, "zero_optimization": {"stage": 1}, **changes}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (deepspeed(fp16={"enabled": True}, bf16={"enabled": True}), ("CONFIG_FP16_AND_BF16", "bf16.enabled")),
        (deepspeed(bfloat16={"enabled": True}, fp16={"enabled": True}), ("CONFIG_FP16_AND_BF16", "fp16.enabled")),
        (deepspeed(fp16={"enabled": True}, amp={"enabled": True}), ("CONFIG_DOUBLE_SCALING", "amp.enabled")),
        (
            deepspeed(fp16={"enabled": True}, torch_autocast={"enabled": True, "dtype": "float16"}),
            ("CONFIG_DOUBLE_SCALING", "torch_autocast.enabled"),
        ),
        (deepspeed(communication_data_type="fp16"), ("CONFIG_REDUCE_DTYPE", "communication_data_type")),
        (deepspeed(bf16={"enabled": True}, communication_data_type="fp16"), ("CONFIG_REDUCE_DTYPE", "communication_data_type")),
        (
            deepspeed(bf16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"}),
            ("CONFIG_REDUCE_DTYPE", "data_types.grad_accum_dtype"),
        ),
        (
            deepspeed(fp16={"enabled": True, "fp16_master_weights_and_grads": True}),
            ("CONFIG_TRUE_HALF", "fp16.fp16_master_weights_and_grads"),
        ),
        *[
            (deepspeed(fp16={"enabled": True, key: value}), ("CONFIG_LOSS_SCALE", f"fp16.{key}"))
            for key, value in [
                ("loss_scale", 1),
                ("loss_scale", -1),
                ("loss_scale", 2**30),
                ("loss_scale", "dynamic"),
                ("initial_scale_power", 65536),
                ("initial_scale_power", 40),
                ("initial_scale_power", 0),
                ("loss_scale_window", 0),
                ("loss_scale_window", 2),
                ("hysteresis", 0),
                ("min_loss_scale", 0),
                ("init_scale", 65536),
                ("growth_interval", 2000),
            ]
        ],
        (
            deepspeed(fp16={"enabled": True, "initial_scale_power": 8, "min_loss_scale": 1024}),
            ("CONFIG_LOSS_SCALE", "fp16.min_loss_scale"),
        ),
        (deepspeed(bf16={"enabled": True, "loss_scale": 0}), ("CONFIG_LOSS_SCALE", "bf16.loss_scale")),
        (deepspeed(fp16={"loss_scale": 0}), ("CONFIG_LOSS_SCALE", "fp16")),
        (deepspeed(fp16={"enabled": True}, loss_scale=128), ("CONFIG_LOSS_SCALE", "loss_scale")),
    ],
)
def test_deepspeed(tmp_path, data, expected):
    assert of_json(tmp_path, data) == [expected]


@pytest.mark.parametrize(
    "data",
    [
        HEALTHY_DEEPSPEED,
        deepspeed(fp16={"enabled": True, "loss_scale": 128}),
        deepspeed(fp16={"enabled": True, "initial_scale_power": 32, "loss_scale_window": 100}),
        deepspeed(fp16={"enabled": False, "initial_scale_power": 65536}, bf16={"enabled": True}),
        deepspeed(bf16={"enabled": True}, communication_data_type="fp32", data_types={"grad_accum_dtype": "fp32"}),
        deepspeed(fp16={"enabled": True}, amp={"enabled": False}),
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16"},
        {"loss_scale": 1, "fp16": True, "name": "a game engine's settings"},
        {"fp16": True, "bf16": True},
        ["fp16", "bf16"],
        {"output_dir": "out", "learning_rate": 1e-4, "bf16": True, "fp16": False},
        {"output_dir": "o", "learning_rate": 1e-4, "bf16": True, "torch_dtype": "bfloat16", "use_peft": True, "lora_r": 8},
        {"output_dir": "o", "learning_rate": 1e-4, "bf16": True, "torch_dtype": "bfloat16", "deepspeed": "ds.json"},
    ],
)
def test_healthy_settings_and_other_files_are_silent(tmp_path, data):
    assert of_json(tmp_path, data) == []


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"fp16": True, "bf16": True}, [("CONFIG_FP16_AND_BF16", "bf16")]),
        ({"fp16_full_eval": True, "bf16_full_eval": True}, [("CONFIG_FP16_AND_BF16", "bf16_full_eval")]),
        (
            {"bf16": True, "deepspeed": deepspeed(fp16={"enabled": True})},
            [("CONFIG_FP16_AND_BF16", "deepspeed.fp16.enabled")],
        ),
        ({"fp16": True, "torch_dtype": "float16"}, [("CONFIG_TRUE_HALF", "torch_dtype")]),
        ({"bf16": True, "torch_dtype": "torch.bfloat16"}, [("CONFIG_TRUE_HALF", "torch_dtype")]),
        ({"deepspeed": deepspeed(fp16={"enabled": True, "loss_scale": 1})}, [("CONFIG_LOSS_SCALE", "deepspeed.fp16.loss_scale")]),
    ],
)
def test_trainer_arguments(tmp_path, data, expected):
    assert of_json(tmp_path, {"output_dir": "out", "per_device_train_batch_size": 8, **data}) == expected


def test_lightning_yaml(tmp_path):
    assert of_yaml(tmp_path, "seed: 1\ntrainer:\n  max_epochs: 3\n  precision: 16-true\n") == [("CONFIG_TRUE_HALF", 4)]
    assert of_yaml(tmp_path, "trainer:\n  precision: bf16-true\n") == [("CONFIG_TRUE_HALF", 2)]
    assert of_yaml(tmp_path, "_target_: lightning.pytorch.Trainer\nprecision: 16-true\n") == [("CONFIG_TRUE_HALF", 2)]
    for precision in ("16-mixed", "bf16-mixed", "32-true", "16", "bf16"):
        assert of_yaml(tmp_path, f"trainer:\n  precision: {precision}\n") == []
    strategy = "  strategy:\n    class_path: lightning.pytorch.strategies.DeepSpeedStrategy\n    init_args: {hysteresis: 0}\n"
    assert of_yaml(tmp_path, f"trainer:\n  precision: 16-mixed\n{strategy}") == [("CONFIG_LOSS_SCALE", 5)]
    plugin = "  plugins:\n    - class_path: MixedPrecision\n      init_args: {precision: bf16-mixed, scaler: {a: 1}}\n"
    assert of_yaml(tmp_path, f"trainer:\n  max_epochs: 1\n{plugin}") == [("CONFIG_LOSS_SCALE", 3)]


def test_accelerate_yaml(tmp_path):
    base = "compute_environment: LOCAL_MACHINE\ndistributed_type: {}\nmixed_precision: bf16\nnum_processes: 2\n"
    assert of_yaml(tmp_path, base.format("MULTI_GPU") + "downcast_bf16: 'yes'\n") == []
    assert of_yaml(tmp_path, base.format("XLA") + "downcast_bf16: 'yes'\n") == [("CONFIG_TRUE_HALF", 5)]
    assert of_yaml(tmp_path, base.format("MULTI_GPU") + "fp16: true\n") == [("CONFIG_FP16_AND_BF16", 5)]


def test_yaml_comments_silence_findings(tmp_path):
    assert of_yaml(tmp_path, "trainer:\n  precision: 16-true  # noqa: CONFIG_TRUE_HALF\n") == []
    assert of_yaml(tmp_path, "# nanny: noqa\ntrainer:\n  precision: 16-true\n") == []


def test_strange_yaml_does_no_harm(tmp_path):
    laughs = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghijklmnopq", "bcdefghijklmnopqr"))
    assert of_yaml(tmp_path, f"{laughs}trainer:\n  precision: 16-true\n") == [("CONFIG_TRUE_HALF", 20)]
    assert of_yaml(tmp_path, "x: !include other.yaml\ntrainer:\n  precision: 16-true\n") == [("CONFIG_TRUE_HALF", 3)]
    assert of_yaml(tmp_path, "a: 1\n---\ntrainer:\n  precision: 16-true\n") == [("CONFIG_TRUE_HALF", 4)]
    odd = ("precision: {{ value }}\n", "precision: [1\n", "? {a: 1}\n: precision\n", "- precision\n", "precision: 2024-99-99\n")
    for text in odd:
        assert of_yaml(tmp_path, text) == []


def test_the_finding_stands_on_its_key(tmp_path):
    text = '{"train_batch_size": 8, "list": [1, {"a": [2]}, "b,:{"],\n "fp16": {"enabled" : true,\n\t"loss_scale":1}}'
    (tmp_path / "ds.json").write_text(text)
    (finding,) = check_model(tmp_path / "ds.json")
    assert (finding.line, finding.column, finding.end_line, finding.end_column) == (3, 2, 3, 16)


def test_a_named_file_that_cannot_be_judged_is_told_and_others_are_not(tmp_path):
    (tmp_path / "a.json").write_text('{"fp16": tru}')
    (tmp_path / "b.json").write_text('{"fp16": true}')
    assert check_paths([str(tmp_path)]).notes == []
    assert [f.code for f in check_model(tmp_path / "a.json")] == ["SYNTAX_ERROR"]
    assert "not the settings of" in check_paths([str(tmp_path / "b.json")]).notes[0]


def test_several_scale_keys_at_the_top_level_are_one_mistake(tmp_path):
    data = deepspeed(bf16={"enabled": True}, loss_scale=0, loss_scale_window=400, hysteresis=2, min_loss_scale=1)
    assert of_json(tmp_path, data) == [("CONFIG_LOSS_SCALE", "loss_scale")]


@pytest.mark.parametrize("data", [{"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"torch_dtype": "float16", "fp16": True}])
def test_half_weights_are_possible_where_the_launcher_is_not_known(tmp_path, data):
    file = tmp_path / "train.json"
    file.write_text(json.dumps({"output_dir": "out", "per_device_train_batch_size": 8, **data}))
    (finding,) = check_paths([str(file)], jobs=1).findings
    assert (finding.code, finding.severity) == ("CONFIG_TRUE_HALF", Severity.INFO)


def test_what_only_some_versions_refuse_is_no_error(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(deepspeed(bf16={"enabled": True, "loss_scale": 0, "hysteresis": 2})))
    (finding,) = check_paths([str(file)], jobs=1).findings
    assert finding.severity == Severity.WARNING
    assert "older ones ignore it" in finding.message

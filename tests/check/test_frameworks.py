"""Precision that a framework or a settings file gives: followed into the code, and compared with what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanny.check.files import check_paths
from nanny.core.finding import Finding, Severity

NET = """
class Net(BASE):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)

    def HOOK(self, x, mask=None):
        q = self.q(x)
        return (q @ q.transpose(1, 2)).masked_fill(mask, -1e9)
"""
HEAD = "import torch\nfrom torch import nn\n"
MODULE = HEAD + NET.replace("BASE", "nn.Module").replace("HOOK", "forward")
LIGHTNING = HEAD + "import lightning as L\n" + NET.replace("BASE", "L.LightningModule").replace("HOOK", "training_step")
LOOP = "    for x, mask in loader:\n        loss = MODEL(x, mask).sum()\n        BACKWARD\n        optimizer.step()\n"
SCALED = """
def train(model, optimizer, loader, loss_fn, dtype=None):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=DTYPE):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def found(root: Path, **texts: str) -> list[Finding]:
    (root / "pyproject.toml").write_text("")
    for name, text in texts.items():
        (root / name.replace("__", ".")).write_text(text)
    return [f for f in check_paths([str(root / "main.py")], jobs=1).findings if f.severity > Severity.INFO]


def mask_constants(findings: list[Finding]) -> list[Severity]:
    return [f.severity for f in findings if f.code == "NUM_MASK_CONSTANT"]


OPTIMIZER = "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
FABRIC = "from lightning.fabric import Fabric\n\ndef main(loader):\n    fabric = Fabric(precision=PRECISION)\n    model = Net()\n"
ACCELERATE = (
    "from accelerate import Accelerator\n\n"
    "def main(loader):\n    acc = Accelerator(mixed_precision=PRECISION)\n    model = Net()\n"
)
FIT = "\ndef main(data):\n    L.Trainer(precision=PRECISION).fit(Net(), data)\n"
PROGRAMS = {
    "lightning": (LIGHTNING + FIT, "16-mixed", "bf16-mixed"),
    "fabric": (
        MODULE + FABRIC + OPTIMIZER + "    model, optimizer = fabric.setup(model, optimizer)\n"
        + LOOP.replace("MODEL", "model").replace("BACKWARD", "fabric.backward(loss)"), "16-mixed", "bf16-mixed",
    ),
    "accelerate": (
        MODULE + ACCELERATE + OPTIMIZER + "    model, optimizer = acc.prepare(model, optimizer)\n"
        + LOOP.replace("MODEL", "model").replace("BACKWARD", "acc.backward(loss)"), "fp16", "bf16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("framework", sorted(PROGRAMS))
def test_a_framework_in_fp16_opens_a_region_and_one_in_bf16_another(tmp_path, framework):
    program, half, wide = PROGRAMS[framework]
    assert mask_constants(found(tmp_path, main__py=program.replace("PRECISION", repr(half)))) == [Severity.WARNING]
    assert mask_constants(found(tmp_path, main__py=program.replace("PRECISION", repr(wide)))) == []


DEEPSPEED = (
    "import deepspeed\n" + MODULE + "\ndef main(loader):\n    model = Net()\n"
    "    engine, optimizer, _, _ = deepspeed.initialize(model=model, config='ds.json')\n"
    "    for x, mask in loader:\n        loss = engine(x, mask).mean()\n        engine.backward(loss)\n        engine.step()\n"
)


@pytest.mark.parametrize(("kind", "expected"), [("fp16", [Severity.WARNING]), ("bf16", [])])
def test_the_settings_file_of_deepspeed_decides(tmp_path, kind, expected):
    assert mask_constants(found(tmp_path, main__py=DEEPSPEED, ds__json=f'{{"{kind}": {{"enabled": true}}}}')) == expected


@pytest.mark.parametrize(
    ("cast", "settings", "is_told"),
    [
        ("x.to(torch.bfloat16)", '{"fp16": {"enabled": true}}', True),
        ("x.half()", '{"bf16": {"enabled": true}}', True),
        ("x.to(engine.device).half()", '{"fp16": {"enabled": true}}', False),
        ("x.to(torch.bfloat16)", '{"fp16": {"enabled": true, "auto_cast": true}}', False),
        ("x.to(next(model.parameters()).dtype)", '{"fp16": {"enabled": true}}', False),
    ],
)
def test_inputs_are_cast_to_the_format_of_deepspeed(tmp_path, cast, settings, is_told):
    program = DEEPSPEED.replace("loss = engine(x, mask)", f"x = {cast}\n        loss = engine(x, mask)").replace("-1e9", "-1e4")
    told = [f for f in found(tmp_path, main__py=program, ds__json=settings) if f.code == "CONFIG_CONFLICT"]
    assert [Path(f.chain[0].file).name for f in told] == ["ds.json"] * is_told


@pytest.mark.parametrize(("profile", "is_told"), [("'large'", True), ("'small'", False), ("None", False)])
def test_settings_that_a_profile_changes_are_put_together(tmp_path, profile, is_told):
    program = f"""
from pathlib import Path
import yaml
from transformers import Trainer, TrainingArguments

def settings(name, profile):
    text = (Path(__file__).parent / name).read_text()
    chosen = yaml.safe_load(text)
    if profile is not None:
        chosen["train"].update(chosen["profiles"][profile])
    return chosen["train"]

def main(model, data):
    Trainer(model, TrainingArguments(**settings("run.yaml", {profile})), train_dataset=data).train()
"""
    text = "train:\n  output_dir: out\n  bf16: true\nprofiles:\n  large:\n    fp16: true\n  small:\n    seed: 3\n"
    told = [(f.code, f.line) for f in found(tmp_path, main__py=program, run__yaml=text)]
    assert told == [("CONFIG_FP16_AND_BF16", 6)] * is_told


def test_the_trainer_of_hugging_face_runs_the_model_in_half(tmp_path):
    head = "from transformers import Trainer, TrainingArguments\n" + MODULE + "\ndef main(data):\n"
    body = "    arguments = TrainingArguments('out', KIND=True)\n    Trainer(model=Net(), args=arguments).train()\n"
    assert mask_constants(found(tmp_path, main__py=head + body.replace("KIND", "fp16"))) == [Severity.WARNING]
    assert mask_constants(found(tmp_path, main__py=head + body.replace("KIND", "bf16"))) == []


def test_a_command_line_of_lightning_takes_the_precision_of_its_file(tmp_path):
    program = LIGHTNING + "\nfrom lightning.pytorch.cli import LightningCLI\n\nLightningCLI(Net)\n"
    settings = "trainer:\n  max_epochs: 3\n  precision: 16-mixed\n"
    (finding,) = found(tmp_path, main__py=program, config__yaml=settings)
    assert finding.code == "NUM_MASK_CONSTANT"
    assert "config.yaml:3" in finding.message


@pytest.mark.parametrize(
    ("name", "text", "loader"),
    [
        ("train__yaml", "amp:\n  dtype: KIND\n", "import yaml\nconfig = yaml.safe_load(open('train.yaml'))\n"),
        ("train__json", '{"amp": {"dtype": "KIND"}}', "import json\nconfig = json.load(open('train.json'))\n"),
        ("train__toml", "[amp]\ndtype = 'KIND'\n", "import tomllib\nconfig = tomllib.load(open('train.toml', 'rb'))\n"),
    ],
)
def test_a_dtype_in_a_settings_file_is_followed_into_the_code(tmp_path, name, text, loader):
    program = "import torch\n" + loader + SCALED.replace("DTYPE", 'getattr(torch, config["amp"]["dtype"])')
    assert [f.code for f in found(tmp_path, main__py=program, **{name: text.replace("KIND", "bfloat16")})] == ["SCALER_WITH_BF16"]
    assert found(tmp_path, main__py=program, **{name: text.replace("KIND", "float16")}) == []


def test_the_default_of_an_option_is_known_and_decides_no_branch(tmp_path):
    options = (
        "import argparse\nimport torch\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--dtype', default='bfloat16')\nargs = parser.parse_args()\n"
    )
    by_name = options + SCALED.replace("DTYPE", "getattr(torch, args.dtype)")
    assert [f.code for f in found(tmp_path, main__py=by_name)] == ["SCALER_WITH_BF16"]
    chosen = options + SCALED.replace("DTYPE", "torch.bfloat16 if args.dtype == 'bfloat16' else torch.float16")
    assert found(tmp_path, main__py=chosen) == []


def test_an_annotation_says_which_model_a_parameter_is(tmp_path):
    program = MODULE + (
        "\ndef step(model: Net, x, mask):\n    with torch.autocast('cuda', dtype=torch.float16):\n        return model(x, mask)\n"
        "\ndef main():\n    print(Net())\n"
    )
    assert mask_constants(found(tmp_path, main__py=program)) == [Severity.WARNING]


def test_code_and_settings_file_that_differ_are_told_with_both_places(tmp_path):
    program, _, _ = PROGRAMS["accelerate"]
    settings = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: KIND\nnum_processes: 2\n"
    text = program.replace("PRECISION", "'bf16'")
    (finding,) = found(tmp_path, main__py=text, accelerate__yaml=settings.replace("KIND", "fp16"))
    assert finding.code == "CONFIG_CONFLICT"
    assert [(Path(link.file).name, link.line) for link in finding.chain] == [("accelerate.yaml", 3), ("main.py", finding.line)]
    assert found(tmp_path, main__py=text, accelerate__yaml=settings.replace("KIND", "bf16")) == []


def test_a_reduction_in_half_is_found_in_toml(tmp_path):
    (tmp_path / "train.toml").write_text('[training]\nmixed_precision_param = "bfloat16"\nmixed_precision_reduce = "bfloat16"\n')
    (finding,) = check_paths([str(tmp_path)], jobs=1).findings
    assert (finding.code, finding.line) == ("CONFIG_REDUCE_DTYPE", 3)


def test_a_test_may_break_things_on_purpose(tmp_path):
    program = MODULE + (
        "\ndef step(model: Net, x, mask):\n    with torch.autocast('cuda', dtype=torch.float16):\n        return model(x, mask)\n"
    )
    assert mask_constants(found(tmp_path, main__py="import pytest\n" + program)) == []


HYDRA = """
import hydra
import lightning as L
from net import Net


@hydra.main(config_path="conf", config_name="train", version_base=None)
def main(cfg):
    L.Trainer(**cfg.trainer).fit(Net(), [])


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("own", "group", "told"),
    [
        ("trainer:\n  precision: 16-mixed\n", "", ["NUM_MASK_CONSTANT"]),
        ("defaults:\n  - trainer: gpu\n  - _self_\n", "precision: 16-mixed\n", ["NUM_MASK_CONSTANT"]),
        ("defaults:\n  - trainer: gpu\ntrainer:\n  precision: 32\n", "precision: 16-mixed\n", []),  # its own word is the last
        ("trainer:\n  precision: bf16-mixed\n", "", []),
    ],
)
def test_the_settings_that_hydra_puts_together_reach_the_code(tmp_path, own, group, told):
    (tmp_path / "conf" / "trainer").mkdir(parents=True)
    (tmp_path / "conf" / "train.yaml").write_text(own)
    (tmp_path / "conf" / "trainer" / "gpu.yaml").write_text(group)
    assert [f.code for f in found(tmp_path, main__py=HYDRA, net__py=LIGHTNING)] == told


@pytest.mark.parametrize(
    "made",
    [
        "EasyDict(yaml.safe_load(open('train.yaml')))",
        "OmegaConf.create(yaml.safe_load(open('train.yaml')))",
        "SimpleNamespace(**yaml.safe_load(open('train.yaml')))",
        "OmegaConf.load('train.yaml')",
    ],
)
def test_an_object_made_of_settings_has_them_as_attributes(tmp_path, made):
    first = "import yaml\nfrom easydict import EasyDict\nfrom omegaconf import OmegaConf\nfrom types import SimpleNamespace\n"
    text = (
        f"{first}{MODULE}\ncfg = {made}\nmodel = Net().to(device='cuda', dtype=getattr(torch, cfg.dtype))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nfor x, mask in []:\n"
        "    model(x, mask).sum().backward()\n    optimizer.step()\n"
    )
    for kind, told in (("float16", {"HALF_CALL", "NUM_MASK_CONSTANT"}), ("float32", set())):
        assert {f.code for f in found(tmp_path, main__py=text, train__yaml=f"dtype: {kind}\n")} == told

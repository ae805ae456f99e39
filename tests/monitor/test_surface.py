"""What the user types and reads: the class, watch_model, check_loss_scale, live lines, dumps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules import module as module_hooks
from torch.optim import SGD, Adam
from training import Apply, above_info, autocast, mlp, recorded, regression, said, scalar, store_of, the, watch

from nanny import MixedPrecisionNanny, Severity, check_loss_scale, watch_model
from nanny.store import reader

FP16 = torch.float16


def broken_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Apply(lambda x: torch.log(-x.abs() - 1)), nn.Linear(16, 1))


def loop(model: nn.Module, nanny: MixedPrecisionNanny, steps: int = 3, *, moves: bool = True) -> None:
    """`moves=False`: the weights stay as they are, so that the same fault comes back in every step."""
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        x, y = regression()(step)
        optimizer.zero_grad()
        with nanny.step(step):
            F.mse_loss(model(x), y).backward()
        if moves:
            optimizer.step()


def test_the_readme_form_works_as_it_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model, criterion = mlp(), nn.MSELoss()
    optimizer = SGD(model.parameters(), lr=0.01)
    dataloader = [regression()(i) for i in range(4)]

    nanny = MixedPrecisionNanny(model, trace_interval=100)
    for step, (x, y) in enumerate(dataloader):
        with nanny.step(step):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
        optimizer.step()
    nanny.close()

    assert len(scalar(tmp_path / "nanny_logs", "loss")) == 4
    assert len(scalar(tmp_path / "nanny_logs", "grad_norm")) == 4
    assert scalar(tmp_path / "nanny_logs", "lr")[3] == pytest.approx(0.01)
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 4


def test_positional_arguments_are_model_optimizer_scaler_interval_folder(tmp_path):
    model = mlp()
    nanny = MixedPrecisionNanny(model, SGD(model.parameters(), lr=0.1), GradScaler("cpu"), 10, str(tmp_path))
    nanny.close()
    assert store_of(tmp_path).exists()


def test_at_the_end_four_lines_tell_findings_cost_dropped_samples_and_the_next_command(tmp_path, capsys):
    model = broken_model()
    nanny = MixedPrecisionNanny(model, output_dir=tmp_path, strict=True)
    loop(model, nanny)
    capsys.readouterr()
    nanny.close()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 4
    assert all(line.startswith("nanny: ") for line in lines)
    assert "error" in lines[0]
    assert "step 0 NAN 1" in lines[0]
    assert re.search(r"[\d.]+ s of the run's [\d.]+ s", lines[1])
    assert "0 samples" in lines[2]
    assert f"nanny summary --db {store_of(tmp_path)}" in lines[3]


def test_a_finding_is_told_on_stderr_while_the_run_goes_on_once(tmp_path, capsys):
    model = broken_model()
    nanny = MixedPrecisionNanny(model, output_dir=None, strict=True, trace_interval=1)
    loop(model, nanny, steps=2, moves=False)
    _, err = capsys.readouterr()
    loop(model, nanny, steps=4, moves=False)
    _, later = capsys.readouterr()
    nanny.close()
    assert "nanny: step 0 ERROR NAN 1" in err
    assert "->" in err  # what to do about it
    assert "NAN 1" not in later


def test_repeats_are_counted_in_the_record(tmp_path):
    model = broken_model()
    with watch(model, output_dir=tmp_path) as nanny:
        loop(model, nanny, steps=4, moves=False)
    with reader.reading(store_of(tmp_path)) as db:
        run = reader.pick_run(db, None)
    assert ["NAN", "1", 4, 3] in [list(row) for row in run.meta["repeats"]]


def test_the_record_says_how_the_run_ended(tmp_path):
    def status(folder) -> str:
        with reader.reading(store_of(folder)) as db:
            return reader.pick_run(db, None).status

    model = mlp()
    with watch(model, output_dir=tmp_path / "good") as nanny:
        loop(model, nanny)
    assert status(tmp_path / "good") == "finished"

    def dies() -> None:
        with watch(model, output_dir=tmp_path / "bad") as nanny:
            loop(model, nanny)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        dies()
    assert status(tmp_path / "bad") not in ("finished", "running")


def test_the_autocast_dtype_is_detected(tmp_path):
    model = mlp()
    for dtype, name in ((torch.bfloat16, "bfloat16"), (FP16, "float16"), (None, "")):
        with watch(model, output_dir=tmp_path / str(dtype)) as nanny:
            for step in range(2):
                with nanny.step(step):
                    with autocast(dtype):
                        loss = model(torch.rand(4, 8)).float().mean()
                    loss.backward()
        with reader.reading(store_of(tmp_path / str(dtype))) as db:
            assert reader.pick_run(db, None).amp_dtype == name


# dumps


def test_on_an_error_the_culprit_can_be_replayed_from_its_dump(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight.fill_(4500.0)
    model = nn.Sequential(nn.Linear(16, 16), layer, nn.Linear(16, 1))
    with watch(model, output_dir=tmp_path, dump_on_error=True) as nanny:
        for step in range(3):
            with nanny.step(step):
                with autocast(FP16):
                    loss = model(torch.full((4, 16), 30.0)).float().mean()
                loss.backward()
    with reader.reading(store_of(tmp_path)) as db:
        rows = reader.dumps(db, reader.pick_run(db, None).id)
    assert rows
    assert rows[0].site == "1"
    tensors = safetensors.load_file(rows[0].path)
    with autocast(FP16):
        again = F.linear(tensors["input.0"], tensors["weight.weight"], tensors["weight.bias"])
    assert again.isinf().any()
    assert tensors["input.0"].isfinite().all()
    sidecar = json.loads(Path(rows[0].path).with_suffix(".json").read_text(encoding="utf-8"))
    assert (sidecar["step"], sidecar["place"]["site"], sidecar["classes"]) == (0, "1", "Linear")
    torch.set_rng_state(tensors["rng_state"])


def test_nothing_is_dumped_unless_asked_and_never_without_end(tmp_path):
    model = broken_model()
    with watch(model, output_dir=tmp_path / "a") as nanny:
        loop(model, nanny, moves=False)
    assert not (tmp_path / "a" / "dumps").exists()
    with watch(model, output_dir=tmp_path / "b", dump_on_error=True) as nanny:
        loop(model, nanny, steps=40, moves=False)
    assert 1 <= len(list((tmp_path / "b" / "dumps").glob("*.safetensors"))) <= 8


# the functional form


def plain_training(model: nn.Module, steps: int, *, scaler: GradScaler | None = None, per_step=None) -> None:
    """Without one word about the nanny."""
    optimizer, batches = Adam(model.parameters(), lr=1e-3), regression()
    scaler = scaler or GradScaler("cpu", enabled=False)
    for step in range(steps):
        x, y = batches(step)
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        if per_step is not None:
            per_step()
        scaler.step(optimizer)
        scaler.update()


def test_watch_model_finds_the_steps_by_itself_and_writes_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = broken_model()
    watcher = watch_model(model)
    plain_training(model, 3)
    watcher.remove()
    assert the(watcher.findings, "NAN").site == "1"
    assert "NAN 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_watch_model_is_quiet_on_a_healthy_run_and_can_be_removed():
    model = mlp()
    before = dict(module_hooks._global_forward_pre_hooks), torch.autograd.backward
    watcher = watch_model(model)
    plain_training(model, 30)
    watcher.remove()
    watcher.remove()
    assert above_info(watcher.findings) == []
    assert (dict(module_hooks._global_forward_pre_hooks), torch.autograd.backward) == before


def test_watch_model_sees_evaluation_and_accumulation_for_what_they_are():
    model, batches = mlp(), regression()
    optimizer = Adam(model.parameters(), lr=1e-3)
    watcher = watch_model(model)
    for step in range(20):
        x, y = batches(step)
        (F.mse_loss(model(x), y) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(x)
    watcher.remove()
    assert above_info(watcher.findings) == []
    assert 9 <= watcher.nanny._steps <= 11


def test_a_watched_model_keeps_its_bits():
    def run(watched: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        watcher = watch_model(model) if watched else None
        plain_training(model, 6)
        if watcher is not None:
            watcher.remove()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True)))


def test_check_loss_scale_follows_the_scale_from_call_to_call(capsys):
    class Overflows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.bad = mlp(), False

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            if self.bad:
                out.register_hook(lambda g: g * float("inf"))
            return out

    model, scaler, found = Overflows(), GradScaler("cpu", init_scale=1024.0), []
    plain_training(model, 5, scaler=scaler, per_step=lambda: found.extend(check_loss_scale(scaler)))
    assert above_info(found) == []
    model.bad = True
    plain_training(model, 14, scaler=scaler, per_step=lambda: found.extend(check_loss_scale(scaler)))
    codes = {f.code: f.severity for f in found}
    assert codes["SCALE_DECLINE"] is Severity.ERROR
    assert codes["SCALE_COLLAPSE"] is Severity.ERROR
    assert "SCALE_DECLINE" in capsys.readouterr().err


def test_check_loss_scale_stays_silent_while_the_scale_is_searched_or_switched_off(capsys):
    scaler = GradScaler("cpu", init_scale=2.0**24)
    model, found = mlp(), []
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(25):
        x, y = regression()(step)
        optimizer.zero_grad()
        with autocast(FP16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        found += check_loss_scale(scaler)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**24
    assert above_info(found) == []
    assert check_loss_scale(GradScaler("cpu", enabled=False)) == []
    assert capsys.readouterr().err == ""


def test_a_second_model_has_its_own_names(tmp_path):
    generator, critic = mlp(seed=1), broken_model()
    nanny = watch(generator, output_dir=tmp_path)
    nanny.add_model(critic, "critic.")
    with nanny.step(0):
        critic(torch.rand(4, 8)).mean().backward()
        generator(torch.rand(4, 8)).mean().backward()
    nanny.close()
    assert said(nanny.findings, "NAN")[0].site == "critic.1"


def test_a_head_that_is_replaced_after_the_nanny_was_made_is_watched_too(tmp_path):
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 1)})
    nanny = watch(model, output_dir=tmp_path)
    model["head"] = nn.Linear(8, 2)
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(3):
        with nanny.step(step):
            model["head"](model["body"](torch.rand(4, 8))).mean().backward()
        optimizer.step()
    nanny.close()
    assert {"head.weight", "head.bias"} <= set(recorded(tmp_path, "grad", 2))
    assert "head" in recorded(tmp_path, "output", 2)


def test_layers_are_traced_or_not_as_their_names_say(tmp_path):
    def traced(folder: str, **filters: object) -> set[str]:
        model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "head": nn.Linear(8, 1)})
        nanny = watch(model, output_dir=tmp_path / folder, **filters)
        for step in range(2):
            with nanny.step(step):
                model["head"](model["body"](torch.rand(4, 8))).mean().backward()
            SGD(model.parameters(), lr=0.01).step()
        nanny.close()
        assert {"head.weight", "body.0.weight"} <= set(recorded(tmp_path / folder, "grad", 0))  # gradients are those of all
        return set(recorded(tmp_path / folder, "output", 0))

    assert traced("all") == {"body", "body.0", "body.1", "head"}
    assert traced("in", include="body") == {"body", "body.0", "body.1"}
    assert traced("out", exclude=["*.1", "head"]) == {"body", "body.0"}
    assert traced("both", include=["body", "head"], exclude="body.*") == {"body", "head"}

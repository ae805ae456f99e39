"""What goes wrong without an error is said while the run goes on, not only at its end."""

from __future__ import annotations

import torch
from corpus.overflow.products import UnitLength
from torch import nn

from nanny import MixedPrecisionNanny


def lines_while_training(capsys, wide: bool) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), UnitLength(wide), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    told = []
    nanny = MixedPrecisionNanny(model, optimizer, output_dir=None, examine="every", strict=True, on_finding=told.append)
    for step in range(4):
        x = 300 * torch.randn(32, 8)
        with nanny.step(step):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            nn.functional.mse_loss(out.float(), x[:, :1].sign()).backward()
            optimizer.step()
    said = capsys.readouterr().err
    nanny.close()
    assert [f.code for f in told if f.code == "norm_square_overflow_fp16"] == ([] if wide else ["norm_square_overflow_fp16"])
    return said


def test_a_silent_overflow_is_told_after_two_examined_steps(capsys):
    assert lines_while_training(capsys, wide=False).count("norm_square_overflow_fp16") == 1


def test_the_same_norm_in_full_precision_is_not(capsys):
    assert lines_while_training(capsys, wide=True) == ""


def test_a_callback_hears_of_it_also_where_nothing_is_printed(capsys):
    told = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), UnitLength(wide=False), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with MixedPrecisionNanny(model, optimizer, output_dir=None, live=False, examine="every", on_finding=told.append) as nanny:
        for step in range(4):
            x = 300 * torch.randn(32, 8)
            with nanny.step(step):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    out = model(x)
                nn.functional.mse_loss(out.float(), x[:, :1].sign()).backward()
                optimizer.step()
    assert [f.code for f in told if f.code == "norm_square_overflow_fp16"] == ["norm_square_overflow_fp16"]
    assert capsys.readouterr().err == ""


def test_once_the_cause_is_told_what_follows_from_it_comes_without_advice_of_its_own(capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=1024.0)
    nanny = MixedPrecisionNanny(model, optimizer, scaler, output_dir=None, strict=True)
    for step in range(16):
        x = (1e5 if step >= 4 else 1.0) * torch.ones(4, 8)  # the first matrix product ends at infinity from step 4 on
        with nanny.step(step):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    before, _, after = capsys.readouterr().err.partition("nanny: diagnosis: ")
    assert before.count(" ERROR ") >= 1
    assert after.count(" ERROR ") >= 1
    assert " -> " not in before
    assert after.count(" -> ") == 1  # the remedy of the cause
    nanny.close()

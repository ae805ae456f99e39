"""What the monitor writes is true: gradients at module outputs are on record without the loss scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nanny import MixedPrecisionNanny
from nanny.core.formats import BELOW_BIN, FIRST_BIN, HISTOGRAM_BINS, ZERO_BIN
from nanny.core.step import SiteTable
from nanny.monitor.recording import unscale
from nanny.store import reader


def record(folder: Path, amp: bool) -> tuple[np.ndarray, np.ndarray]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=2.0**12)
    with MixedPrecisionNanny(model, trace_interval=1, output_dir=folder, live=False, strict=True) as nanny:
        for step in range(3):
            with nanny.step(step):
                with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
                    loss = nn.functional.cross_entropy(model(torch.randn(8, 8)), torch.randint(0, 4, (8,)))
                optimizer.zero_grad()
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    with reader.reading(folder / "metrics.db") as db:
        norms = reader.samples(db, 1, "output_grad", "norm")[1]
        histograms = np.stack([h for _, h in reader.histograms(db, 1, "output_grad")])
    return norms, histograms


def test_output_gradients_of_a_scaled_run_compare_with_those_of_a_plain_one(tmp_path):
    plain, plain_bins = record(tmp_path / "plain", amp=False)
    scaled, scaled_bins = record(tmp_path / "scaled", amp=True)
    assert scaled == pytest.approx(plain, rel=0.02)
    centre = [(np.arange(HISTOGRAM_BINS) * h).sum(axis=-1) / h.sum(axis=-1) for h in (plain_bins, scaled_bins)]
    assert centre[1] == pytest.approx(centre[0], abs=0.2)  # of a binary order


def test_a_histogram_moves_by_whole_orders_and_loses_nothing():
    histogram = np.zeros((1, HISTOGRAM_BINS), dtype=np.int64)
    histogram[0, [ZERO_BIN, FIRST_BIN + 2, FIRST_BIN + 100]] = 5, 7, 11
    table = SiteTable(("a",), {"count": np.array([23.0]), "norm": np.array([8.0])}, ("float16",), histogram)
    moved = unscale(table, 16.0)
    assert moved.columns["norm"].tolist() == [0.5]
    assert moved.columns["count"].tolist() == [23.0]
    assert moved.histograms[0, [ZERO_BIN, BELOW_BIN, FIRST_BIN + 96]].tolist() == [5, 7, 11]
    assert moved.histograms.sum() == 23
    assert unscale(table, None) is table


def test_clipping_is_on_record_and_the_norms_are_from_before_it(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MixedPrecisionNanny(model, output_dir=tmp_path, live=False, strict=True) as nanny:
        with nanny.step(0):
            model(torch.randn(8, 4) * 10).square().mean().backward()
            true = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    with reader.reading(tmp_path / "metrics.db") as db:
        curves = reader.scalars(db, 1)
    assert curves["clip"][1].tolist() == [0.5]
    assert curves["grad_norm"][1][0] == pytest.approx(true)
    assert true > 5

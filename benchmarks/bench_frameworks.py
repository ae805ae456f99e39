"""What watching costs in a framework: a step of the transformers Trainer and of Lightning's, watched or not, in turn.

Each training runs a few steps, of which the first are left out; time is that of the processor, and the smallest counts.
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch

from .gpt import BATCH, CONTEXT, VOCABULARY, Gpt

ROUNDS, STEPS, WARM_UP, BAR = 7, 12, 3, 1.02
OPTIONS: dict[str, Any] = {"trace_interval": 10**6, "examine": "off", "live": False, "strict": True}


def _rows() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{"tokens": torch.randint(0, VOCABULARY, (CONTEXT + 1,), generator=draw)} for _ in range(STEPS * BATCH)]


class _Clock:
    """Seconds of the processor from step to step."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def tick(self, *_: object, **__: object) -> None:
        self.at.append(time.process_time())

    @property
    def shortest(self) -> float:
        return min(b - a for a, b in zip(self.at[WARM_UP:], self.at[WARM_UP + 1 :]))


def trainer_step(folder: str, watched: bool) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from nanny.integrations.transformers import NannyCallback

    clock = _Clock()
    timed = type("Timed", (TrainerCallback,), {"on_step_end": clock.tick})()
    settings = TrainingArguments(
        f"{folder}/trainer", max_steps=STEPS, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True
    )
    callbacks = [timed, NannyCallback(output_dir=f"{folder}/nanny", **OPTIONS)] if watched else [timed]
    with redirect_stdout(StringIO()):
        Trainer(_Model(), settings, train_dataset=_rows(), callbacks=callbacks).train()
    return clock.shortest


def lightning_step(folder: str, watched: bool) -> float:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader

    from nanny.integrations.lightning import NannyCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _Model()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    clock = _Clock()
    timed = type("Timed", (Callback,), {"on_train_batch_end": clock.tick})()
    callbacks = [timed, NannyCallback(output_dir=f"{folder}/nanny", **OPTIONS)] if watched else [timed]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", max_steps=STEPS, callbacks=callbacks, default_root_dir=folder, **quiet)
    trainer.fit(Module(), DataLoader(_rows(), batch_size=BATCH))
    return clock.shortest


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = Gpt()

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.gpt(tokens[:, :-1])
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())}


def compare(step: Callable[[str, bool], float], folder: str) -> tuple[float, float, float]:
    """Watched to plain, plain to plain, and the seconds of a plain step; the smallest of all rounds of each."""
    plain, watched, again = [], [], []
    for _ in range(ROUNDS):
        plain.append(step(folder, False))
        watched.append(step(folder, True))
        again.append(step(folder, False))
    whole = min(*plain, *again)
    return min(watched) / whole, statistics.median(a / b for a, b in zip(plain, again)), whole


def main() -> int:
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, step in (("transformers Trainer", trainer_step), ("Lightning", lightning_step)):
            ratio, control, plain = compare(step, folder)
            missed += ratio > BAR
            said = f"A/A control {control:.2f}; {1e3 * plain:.1f} ms; bar {BAR}: {'met' if ratio <= BAR else 'MISSED'}"
            print(f"{name}: a watched step takes {ratio:.3f} of a plain one ({said})")
    return 1 if missed else 0

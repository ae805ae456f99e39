"""Lightning's Trainer on a module whose training step calls its parts, with accumulation, clipping and validation."""

import sys
import tempfile
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from task import ACCUMULATE, ROWS, STEPS, WORLD, Task, fingerprint
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore", module="lightning")


class Module(LightningModule):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.net = task, task.model(amp=False)

    def training_step(self, batch, index):
        return self.net(**batch)["loss"]

    def validation_step(self, batch, index):
        self.net(**batch)

    def on_after_backward(self) -> None:
        if self.task.planted == "clip":  # the gradients are still scaled here
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.task.lr, momentum=0.9)


def train(
    fault: str, steps: int = STEPS, callbacks=(), saves_in: str | None = None, resume: str | None = None, save: bool = False
):
    task = Task(fault)
    module = Module(task)
    precision = {torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}.get(task.amp)
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=None if task.planted in ("lr", "clip") else 1.0,
        plugins=[MixedPrecision(precision, "cpu", task.scaler())] if precision else None,
        val_check_interval=10,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=1,
        callbacks=list(callbacks),
        default_root_dir=saves_in or tempfile.mkdtemp(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = task.rows()
    trainer.fit(module, DataLoader(rows, ROWS), DataLoader(rows[:ROWS], ROWS), ckpt_path=resume, weights_only=False)
    if save:
        trainer.save_checkpoint(f"{saves_in}/last.ckpt")
    return module.net


if __name__ == "__main__":
    print("weights", fingerprint(train(sys.argv[1])))

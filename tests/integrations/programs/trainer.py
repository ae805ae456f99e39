"""The transformers Trainer, with accumulation, clipping and evaluation."""

import sys
import tempfile

import torch
from task import ACCUMULATE, ROWS, STEPS, Task, fingerprint, set_up_fp16
from transformers import Trainer, TrainingArguments


class Impatient(Trainer):
    """Clips after each backward pass, before the gradients are unscaled."""

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss


def train(fault: str, steps: int = STEPS, callbacks=(), saves_in: str | None = None, resume: bool = False, save_steps: int = 0):
    task = Task(fault)
    model = task.model(amp=False)
    rows = task.rows()
    arguments = TrainingArguments(
        output_dir=saves_in or tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=task.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1e9 if task.planted == "lr" else 1.0,
        bf16=task.amp is torch.bfloat16,
        use_cpu=True,
        eval_strategy="steps",
        eval_steps=5,
        logging_steps=1,
        report_to="none",
        save_strategy="steps" if save_steps else "no",
        save_steps=save_steps or 500,
        disable_tqdm=True,
        dataloader_num_workers=0,
        train_sampling_strategy="sequential",
    )
    trainer = (Impatient if task.planted == "clip" else Trainer)(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:ROWS],
        callbacks=list(callbacks),
        optimizers=(torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9), None),
    )
    set_up_fp16(trainer.accelerator, task.scaler())
    trainer.train(resume_from_checkpoint=resume or None)
    return model


if __name__ == "__main__":
    print("weights", fingerprint(train(sys.argv[1])))

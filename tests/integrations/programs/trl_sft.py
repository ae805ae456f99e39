"""TRL's SFTTrainer on a tiny Llama made here, with accumulation and clipping; tokens are given as numbers."""

import os
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from datasets import Dataset
from task import ACCUMULATE, ROWS, STEPS, Task, fingerprint, set_up_fp16
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS, LENGTH = 64, 12


class Impatient(SFTTrainer):
    """Clips after each backward pass, before the gradients are unscaled."""

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss


def tokenizer():
    words = {f"w{i}": i for i in range(WORDS - 2)} | {"<pad>": WORDS - 2, "<eos>": WORDS - 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="<pad>", eos_token="<eos>", unk_token="w0"
    )


def net(task: Task) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )
    if task.planted == "overflow":
        with torch.no_grad():  # the same function in FP32
            model.model.layers[1].mlp.up_proj.weight.mul_(1e7)
            model.model.layers[1].mlp.down_proj.weight.div_(1e7)
    return model.bfloat16() if task.planted == "lost" else model


def rows(steps: int) -> Dataset:
    """The next word is three further on."""
    draw = torch.Generator().manual_seed(1)
    first = torch.randint(0, WORDS - 2, (steps * ACCUMULATE * ROWS, 1), generator=draw)
    return Dataset.from_dict({"input_ids": ((first + 3 * torch.arange(LENGTH)) % (WORDS - 2)).tolist()})


def train(fault: str, steps: int = STEPS, callbacks=(), **_):
    task = Task(fault)
    model = net(task)
    lr = {"lr": 30.0, "lost": 1e-6}.get(task.planted, 0.05)
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=lr,
        lr_scheduler_type="constant",
        max_grad_norm=1e9 if task.planted == "lr" else 1.0,
        bf16=task.amp is torch.bfloat16,
        fp16=False,
        gradient_checkpointing=False,
        max_length=LENGTH,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=5,
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = (Impatient if task.planted == "clip" else SFTTrainer)(
        model,
        arguments,
        train_dataset=rows(steps),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        optimizers=(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), None),
    )
    set_up_fp16(trainer.accelerator, task.scaler())
    trainer.train()
    return model


if __name__ == "__main__":
    print("weights", fingerprint(train(sys.argv[1])))

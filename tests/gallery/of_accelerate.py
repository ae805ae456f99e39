"""Loops with Accelerate, around models of transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.optim import SGD

from . import BF16, DATA, FP32, Batch, Case, Job, Run, next_token, own_loss, sentences, tokens


def by_accelerate(run: Run, **options: Any) -> Any:
    from nanny.integrations.accelerate import watch

    job = run.job
    AcceleratorState._reset_state(True)  # it allows one format per process
    accelerator = Accelerator(
        mixed_precision="no" if job.pure or job.dtype == FP32 else "bf16", cpu=True, gradient_accumulation_steps=job.micro
    )
    model, optimizer = accelerator.prepare(run.model, run.optimizer)
    watcher = watch(accelerator, live=False, output_dir=None, **options) if options else None
    for i in range(job.steps * job.micro):
        batch = {k: v.to(job.dtype) if job.pure and v.is_floating_point() else v for k, v in job.batch(i).items()}
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = job.loss(model, batch)
            accelerator.backward(loss)
            if job.clip:
                accelerator.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
            optimizer.zero_grad()
        if (i + 1) % job.micro == 0:
            run.losses.append(float(loss.detach()))
    if watcher:
        watcher.close()
    accelerator.free_memory()
    return watcher


def gemma() -> Job:
    config = hf.GemmaConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_key_value_heads=2,
        head_dim=16,
    )  # fmt: skip
    return Job(hf.GemmaForCausalLM(config), tokens(), next_token, BF16)


def roberta() -> Job:
    config = hf.RobertaConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4,
    )  # fmt: skip
    return Job(hf.RobertaForSequenceClassification(config), sentences(), own_loss, BF16, lr=3e-3)


def regression() -> Job:
    config = hf.BertConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    def batch(i: int) -> Batch:
        ids = sentences()(i)["input_ids"]
        return {"input_ids": ids, "amount": ids[:, 0].float() / 10}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return (model(input_ids=batch["input_ids"]).logits[:, 0].float() - batch["amount"]).square().mean()

    return Job(hf.BertForSequenceClassification(config), batch, loss, BF16)


# ---- faults


def small_rate_in_format(job: Job) -> None:
    job.pure, job.lr, job.steps = True, 3e-5, 120
    for p in job.model.parameters():
        if p.dim() > 1:
            p.data.mul_(5.0)


def far_amounts(job: Job) -> None:
    """Amounts far from zero in bf16: their differences are rounded away."""
    sound, dtype = job.batch, job.dtype

    def batch(i: int) -> Batch:
        values = sound(i)
        return {**values, "amount": values["amount"] + 1000}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        said = model(input_ids=batch["input_ids"]).logits[:, 0].float()
        return (said - (batch["amount"].to(dtype) - 1000).float()).square().mean()

    def true_error(run: Run) -> float:
        with torch.no_grad():
            batch = sound(999)
            return float((run.model(input_ids=batch["input_ids"]).logits[:, 0].float() - batch["amount"]).square().mean())

    job.batch, job.loss, job.judged_by, job.steps, job.lr = batch, loss, true_error, 120, 3e-3


def recurrent_gain(job: Job) -> None:
    """The residual stream grows without a bound, in any format, and the rate with it."""
    job.optimizer, job.lr = SGD, 30.0


def outlier(job: Job) -> None:
    sound = job.batch

    def batch(i: int) -> Batch:
        values = sound(i)
        if i == 12:
            values["amount"] = values["amount"] * 1e6
        return values

    job.batch, job.optimizer, job.lr = batch, SGD, 1e-2


CASES = (
    Case("accelerate_gemma_small_rate_in_format", gemma, small_rate_in_format, ("update_lost",), ("optimizer", "model", "lm_head",
         "<root>"), loop=by_accelerate),
    Case("accelerate_regression_far_amounts", regression, far_amounts, ("target_in_low_precision", "catastrophic_cancellation",
         "integer_in_low_precision"), (*DATA, "op:_to_copy", "op:to", "op:sub", "<root>", "loss"), loop=by_accelerate),
    Case("accelerate_roberta_rate_too_high", roberta, recurrent_gain, ("lr_too_high",), ("",), precision=False,
         loop=by_accelerate),
    Case("accelerate_regression_outlier", regression, outlier, ("data_outlier",), DATA, precision=False,
         loop=by_accelerate),
)  # fmt: skip

"""Loops that Lightning holds: its Trainer, and Fabric."""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import torch
import transformers as hf
from lightning import Fabric, LightningModule, Trainer
from torch import Tensor
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader

from . import BF16, DATA, FP16, FP32, Batch, Case, Job, Run, next_token, own_loss, sentences, tokens, with_nan_in_batch, with_rate

logging.getLogger("lightning").setLevel(logging.ERROR)


class Module(LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.net, self.run = run.model, run

    def training_step(self, batch: Batch, i: int) -> Tensor:
        loss = self.run.job.loss(self.net, batch)
        self.run.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return self.run.optimizer


def precision_of(job: Job) -> str:
    if job.dtype == FP32:
        return "32-true"
    return ("16" if job.dtype == FP16 else "bf16") + ("-true" if job.pure else "-mixed")


def by_trainer(run: Run, **options: Any) -> Any:
    from nanny.integrations.lightning import NannyCallback

    job, callback = run.job, NannyCallback(live=False, output_dir=None, **options)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            max_steps=job.steps, precision=precision_of(job), accelerator="cpu", devices=1, logger=False, default_root_dir=folder,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=job.clip,
            callbacks=[callback] if options else [],
        )  # fmt: skip
        trainer.fit(Module(run), DataLoader([job.batch(i) for i in range(job.steps)], batch_size=None))
    return callback.nanny


def by_fabric(run: Run, **options: Any) -> Any:
    from nanny.integrations.lightning import watch

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision_of(run.job))
    model, optimizer = fabric.setup(run.model, run.optimizer)
    watcher = watch(model, live=False, output_dir=None, **options) if options else None
    for i in range(run.job.steps):
        loss = run.job.loss(model, run.job.batch(i))
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        run.losses.append(float(loss.detach()))
    if watcher:
        watcher.close()
    return watcher


def gpt2(dtype: torch.dtype = FP16) -> Job:
    config = hf.GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    return Job(
        hf.GPT2LMHeadModel(config),
        tokens(),
        next_token,
        dtype,
        optimizer=Adam,
        steps=40,
    )


def electra() -> Job:
    config = hf.ElectraConfig(
        vocab_size=32, embedding_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4,
    )  # fmt: skip
    return Job(hf.ElectraForSequenceClassification(config), sentences(), own_loss, BF16, lr=3e-3)


def mlp_on_measurements() -> Job:
    block = hf.models.bert.modeling_bert.BertIntermediate(hf.BertConfig(hidden_size=16, intermediate_size=32))
    model = torch.nn.Sequential(block, torch.nn.Linear(32, 1))

    def batch(i: int) -> Batch:
        draw = torch.Generator().manual_seed(i)
        x = torch.randn(16, 16, generator=draw)
        return {"x": x, "y": x[:, :1].sin()}

    def loss(model: Any, batch: Batch) -> Tensor:
        return (model(batch["x"]).float() - batch["y"].float()).square().mean()

    return Job(model, batch, loss, BF16, lr=1e-2)


def opt_by_fabric() -> Job:
    config = hf.OPTConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, max_position_embeddings=32,
        word_embed_proj_dim=32, dropout=0.0,
    )  # fmt: skip
    return Job(hf.OPTForCausalLM(config), tokens(), next_token, BF16)


# ---- faults


def usual_eps(job: Job) -> None:
    """Weights in fp16: there eps of 1e-8 is zero, and so are the squares of the gradients."""
    job.pure = True


def small_rate_in_format(job: Job) -> None:
    job.pure, job.lr, job.steps = True, 1e-5, 150
    for p in job.model.parameters():
        if p.dim() > 1:
            p.data.mul_(10.0)


CASES = (
    Case("lightning_gpt2_usual_eps", gpt2, usual_eps, ("adam_eps_underflow_fp16",), ("optimizer",), loop=by_trainer),
    Case("lightning_electra_small_rate_in_format", electra, small_rate_in_format, ("update_lost",),
         ("optimizer", "net", "<root>"), loop=by_trainer),
    Case("lightning_measurements_nan", mlp_on_measurements, with_nan_in_batch(11, "x"), ("data_nan",), DATA,
         precision=False, loop=by_trainer),
    Case("fabric_opt_rate_too_high", opt_by_fabric, with_rate(20.0, SGD), ("lr_too_high",), ("",), precision=False,
         loop=by_fabric),
)  # fmt: skip

"""Models of transformers, trained by loops of the user."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from . import (
    BF16,
    DATA,
    Batch,
    Case,
    Job,
    Run,
    gained,
    next_token,
    own_loss,
    pictures,
    sentences,
    tokens,
    with_nan_in_batch,
    with_rate,
)

SMALL = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EAGER = {"attn_implementation": "eager"}


def gpt2() -> Job:
    config = hf.GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, **EAGER)
    return Job(hf.GPT2LMHeadModel(config), tokens(), next_token)


def llama() -> Job:
    config = hf.LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=64)
    return Job(hf.LlamaForCausalLM(config), tokens(), next_token)


def bert() -> Job:
    config = hf.BertConfig(**SMALL, **NO_DROPOUT, max_position_embeddings=16, num_labels=4)
    return Job(hf.BertForSequenceClassification(config), sentences(), own_loss, BF16, lr=3e-3)


def t5() -> Job:
    config = hf.T5Config(
        vocab_size=32, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    )
    return Job(hf.T5ForConditionalGeneration(config), tokens(), next_token)


def vit() -> Job:
    config = hf.ViTConfig(**{**SMALL, **NO_DROPOUT}, image_size=16, patch_size=4, num_labels=4)
    del config.vocab_size

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(pixel_values=batch["images"], labels=batch["labels"]).loss

    return Job(
        hf.ViTForImageClassification(config), pictures(batches=3), loss, lr=3e-3, optimizer=lambda p, lr: AdamW(p, lr, eps=1e-12)
    )


def qwen2() -> Job:
    config = hf.Qwen2Config(**SMALL, num_key_value_heads=2, max_position_embeddings=8192)

    def batch(i: int) -> Batch:
        draw = torch.Generator().manual_seed(i)
        ids = torch.randint(2, 32, (8, 12), generator=draw)
        labels = ids.roll(2, 1)  # the token two places before: only positions tell which
        labels[:, :2] = -100
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(3000, 3012).expand(8, -1)}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    return Job(hf.Qwen2ForCausalLM(config), batch, loss, BF16, lr=1e-2, steps=120)


def mixtral() -> Job:
    config = hf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return Job(hf.MixtralForCausalLM(config), tokens(), next_token, BF16)


def distilbert() -> Job:
    config = hf.DistilBertConfig(
        vocab_size=32, dim=32, n_layers=2, n_heads=2, hidden_dim=64, dropout=0.0, attention_dropout=0.0, num_labels=4
    )

    def batch(i: int) -> Batch:
        draw = torch.Generator().manual_seed(i)
        embeds = torch.randn(8, 10, 32, generator=draw)
        return {"inputs_embeds": embeds, "labels": embeds.mean((1, 2)).gt(0).long()}

    return Job(hf.DistilBertForSequenceClassification(config), batch, own_loss, BF16)


def wav2vec2(gain: float = 1.0) -> Job:
    config = hf.Wav2Vec2Config(
        **SMALL,
        conv_dim=(16, 16),
        conv_stride=(4, 4),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        num_labels=4,
        apply_spec_augment=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        feat_proj_dropout=0.0,
        activation_dropout=0.0,
        layerdrop=0.0,
        classifier_proj_size=16,
    )
    time = torch.arange(400) / 400

    def batch(i: int) -> Batch:
        draw = torch.Generator().manual_seed(i)
        labels = torch.randint(0, 4, (8,), generator=draw)
        waves = torch.sin(6.28 * (labels[:, None] + 1) * 8 * time) + 0.05 * torch.randn(8, 400, generator=draw)
        return {"input_values": waves * gain, "labels": labels}

    return Job(hf.Wav2Vec2ForSequenceClassification(config), batch, own_loss, steps=20)


def clip() -> Job:
    text = {**SMALL, "max_position_embeddings": 16, "projection_dim": 16, "eos_token_id": 1}
    vision = {**{k: v for k, v in SMALL.items() if k != "vocab_size"}, "image_size": 16, "patch_size": 4, "projection_dim": 16}
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    images, words = pictures(), sentences()

    def batch(i: int) -> Batch:
        return {"pixel_values": images(i)["images"], "input_ids": words(i)["input_ids"]}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(**batch, return_loss=True).loss

    return Job(hf.CLIPModel(config), batch, loss, steps=20)


def opt() -> Job:
    config = hf.OPTConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, max_position_embeddings=32,
        word_embed_proj_dim=32, dropout=0.0, **EAGER,
    )  # fmt: skip
    return Job(hf.OPTForCausalLM(config), tokens(), next_token, BF16)


def neox() -> Job:
    config = hf.GPTNeoXConfig(**SMALL, max_position_embeddings=32)
    return Job(hf.GPTNeoXForCausalLM(config), tokens(), next_token, lr=1.0, optimizer=SGD, clip=1.0, scale=2.0**12, steps=40)


# ---- faults


def attention_outliers(job: Job) -> None:
    """Queries and keys of the first block grow: their product leaves fp16 before it is divided by the root of the width."""
    gained(job.model.transformer.h[0].attn.c_attn, 3000.0)


class PlainNorm(nn.Module):
    """RMS norm as it is often written, without the way over float32."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def norm_without_float(job: Job) -> None:
    job.pure, job.lr, job.optimizer = True, 0.02, SGD
    for layer in job.model.model.layers:
        layer.input_layernorm = PlainNorm(layer.input_layernorm.weight)
    job.model.model.norm = PlainNorm(job.model.model.norm.weight)
    gained(job.model.model.embed_tokens, 30000.0)


def small_rate(job: Job) -> None:
    job.pure, job.lr, job.steps = True, 2e-5, 150
    for p in job.model.parameters():  # as if trained before: weights of ordinary size
        if p.dim() > 1:
            p.data.mul_(10.0)


def feed_forward_outliers(job: Job) -> None:
    gained(job.model.encoder.block[0].layer[1].DenseReluDense.wi, 300.0)
    gained(job.model.encoder.block[0].layer[1].DenseReluDense.wo, 3000.0)


def tiny_loss_without_scaler(job: Job) -> None:
    def step(run: Run, i: int) -> Tensor:
        run.optimizer.zero_grad()
        loss = run.forward(i)
        (loss * 1e-6).backward()  # a weight among many losses
        run.optimizer.step()
        return loss

    job.step = step


def rotary_in_format(job: Job) -> None:
    """Angles computed in the format of the activations."""
    rotary, dtype = job.model.model.rotary_emb, job.dtype

    def forward(x: Tensor, position_ids: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            angles = position_ids[..., None].to(dtype) * rotary.inv_freq.to(dtype)
            both = torch.cat((angles, angles), -1)
            return both.cos().to(x.dtype), both.sin().to(x.dtype)

    rotary.forward = forward


def loud_recordings(job: Job) -> None:
    """Samples as 16 bit integers, not divided by 32768."""
    sound = job.batch

    def batch(i: int) -> Batch:
        values = sound(i)
        return {**values, "input_values": values["input_values"] * 30000}

    job.batch = batch
    gained(job.model.wav2vec2.feature_extractor.conv_layers[0].conv, 4.0)


def hot_temperature(job: Job) -> None:
    job.pure, job.optimizer = True, SGD
    with torch.no_grad():
        job.model.logit_scale.fill_(11.5)


def rows_without_keys(job: Job) -> None:
    """A mask of -inf in which padded rows see nothing."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids = batch["input_ids"]
        seen = torch.ones(ids.shape[1], ids.shape[1]).tril().bool().expand(len(ids), 1, -1, -1).clone()
        seen[:, :, 0] = False
        mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
        positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
        return model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=ids).loss

    job.loss = loss


def clips_what_is_scaled(job: Job) -> None:
    def step(run: Run, i: int) -> Tensor:
        run.optimizer.zero_grad()
        loss = run.forward(i)
        run.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.update()
        return loss

    job.step = step


CASES = (
    Case("gpt2_attention_outliers", gpt2, attention_outliers, ("attention_logit_overflow_fp16", "activation_overflow_fp16"),
         ("transformer.h.0", "op:matmul", "op:bmm")),
    Case("llama_norm_without_float", llama, norm_without_float, ("norm_square_overflow_fp16",),
         ("model.layers.0.input_layernorm", "model.norm", "op:pow")),
    Case("bert_small_rate", bert, small_rate, ("update_lost",), ("optimizer", "bert", "classifier", "<root>")),
    Case("t5_feed_forward_outliers", t5, feed_forward_outliers, ("activation_overflow_fp16",),
         ("encoder.block.0.layer.1", "op:matmul", "op:mm")),
    Case("vit_tiny_loss_without_scaler", vit, tiny_loss_without_scaler, ("grad_underflow_no_scaling",), ("", )),
    Case("qwen2_rotary_in_format", qwen2, rotary_in_format, ("position_precision_loss", "integer_in_low_precision"),
         ("model.rotary_emb", "model", "op:mul", "op:_to_copy", "op:to")),
    Case("mixtral_rate_too_high", mixtral, with_rate(3.0, SGD), ("lr_too_high",), ("",), precision=False),
    Case("distilbert_nan_in_embeddings", distilbert, with_nan_in_batch(9, "inputs_embeds"), ("data_nan",), DATA,
         precision=False),
    Case("wav2vec2_loud_recordings", wav2vec2, loud_recordings, ("activation_overflow_fp16", "input_out_of_range_fp16"),
         ("wav2vec2.feature_extractor", "op:conv", *DATA, "op:convolution")),
    Case("clip_hot_temperature", clip, hot_temperature, ("exp_overflow_fp16",), ("op:exp", "<root>", "logit_scale")),
    Case("opt_rows_without_keys", opt, rows_without_keys, ("mask_inf_full_row",), ("model.decoder", "op:softmax", "op:_softmax"),
         precision=False),
    Case("neox_clips_what_is_scaled", neox, clips_what_is_scaled, ("clip_before_unscale",), ("",)),
)  # fmt: skip

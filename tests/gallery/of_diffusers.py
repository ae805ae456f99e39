"""Models of diffusers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import AutoencoderKL, DDPMScheduler, DiTTransformer2DModel, UNet2DConditionModel, UNet2DModel
from diffusers.models.attention_processor import AttnProcessor
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.optim import SGD

from . import BF16, DATA, FP32, Batch, Case, Job, Run, exact_average, gained, off_average, pictures, with_nan_in_batch, with_rate


def noised(size: int = 8, channels: int = 3, rows: int = 4) -> Callable[[int], Batch]:
    scheduler, clean = DDPMScheduler(100), pictures(size, rows=rows, channels=channels)

    def batch(i: int) -> Batch:
        draw = torch.Generator().manual_seed(i)
        images, labels = clean(i).values()
        noise = torch.randn(images.shape, generator=draw)
        times = torch.randint(0, 100, (rows,), generator=draw)
        return {"noisy": scheduler.add_noise(images, noise, times), "times": times, "noise": noise, "labels": labels}

    return batch


def predicts_noise(model: nn.Module, batch: Batch) -> Tensor:
    said = model(batch["noisy"], batch["times"]).sample
    return nn.functional.mse_loss(said.float(), batch["noise"].float())


def unet() -> UNet2DModel:
    return UNet2DModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def denoiser() -> Job:
    return Job(unet(), noised(), predicts_noise, BF16)


def with_average(keeps: torch.dtype | None) -> Job:
    job = denoiser()
    job.lr, job.steps = 3e-3, 40

    def update(run: Run) -> None:
        if "average" not in run.extra:
            run.extra["average"] = EMAModel(run.model.parameters(), decay=0.98, use_ema_warmup=False, min_decay=0.98)
            run.extra["average"].to(dtype=keeps)
        run.extra["average"].step(run.model.parameters())

    job.after, job.judged_by = [update, exact_average(0.98)], lambda run: off_average(run, run.extra["average"].shadow_params)
    return job


def average_of_unet() -> Job:
    return with_average(None)


def autoencoder() -> Job:
    model = AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, latent_channels=2, layers_per_block=1,
                          down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)  # fmt: skip

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        posterior = model.encode(batch["images"]).latent_dist
        made = model.decode(posterior.mode()).sample
        return nn.functional.mse_loss(made.float(), batch["images"].float()) + 1e-6 * posterior.kl().mean()

    return Job(model, pictures(8, rows=4), loss, steps=20)


def conditioned() -> Job:
    model = UNet2DConditionModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        cross_attention_dim=8, attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    model.set_attn_processor(AttnProcessor())
    states = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(5))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        said = model(batch["noisy"], batch["times"], states[batch["labels"]]).sample
        return nn.functional.mse_loss(said.float(), batch["noise"])

    return Job(model, noised(), loss, steps=20)


def dit() -> Job:
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=3, out_channels=3, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=100, norm_num_groups=1,
    )  # fmt: skip

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        said = model(batch["noisy"], batch["times"], batch["labels"]).sample
        return nn.functional.mse_loss(said.float(), batch["noise"])

    return Job(model, noised(), loss, BF16)


# ---- faults


def average_in_format(job: Job) -> None:
    other = with_average(job.dtype if job.dtype != FP32 else None)
    job.after, job.judged_by = other.after, other.judged_by


def wide_posterior(job: Job) -> None:
    """A logarithm of the variance of 12 is nothing for float32."""
    with torch.no_grad():
        job.model.quant_conv.bias[2:] = 12.0


def query_outliers(job: Job) -> None:
    attention = job.model.down_blocks[1].attentions[0].transformer_blocks[0].attn1
    gained(attention.to_q, 1500.0)
    gained(attention.to_k, 1500.0)


CASES = (
    Case("diffusers_unet_average_in_format", average_of_unet, average_in_format, ("ema_stagnation",), ("",)),
    Case("diffusers_autoencoder_wide_posterior", autoencoder, wide_posterior, ("exp_overflow_fp16",),
         ("op:exp", "<root>", "loss", "quant_conv")),
    Case("diffusers_conditioned_query_outliers", conditioned, query_outliers,
         ("attention_logit_overflow_fp16", "activation_overflow_fp16"), ("down_blocks.1.attentions.0", "op:baddbmm", "op:bmm")),
    Case("diffusers_dit_rate_too_high", dit, with_rate(30.0, SGD), ("lr_too_high",), ("",), precision=False),
    Case("diffusers_unet_nan_in_noise", denoiser, with_nan_in_batch(7, "noise"), ("data_nan",), DATA, precision=False),
)  # fmt: skip

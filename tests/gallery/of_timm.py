"""Models of timm."""

from __future__ import annotations

import torch
from timm.models.cait import Cait
from timm.models.convnext import ConvNeXt
from timm.models.mlp_mixer import MlpMixer
from timm.models.resnet import BasicBlock, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from timm.utils import ModelEmaV2
from torch import Tensor
from torch.optim import SGD

from . import BF16, FP32, Case, Job, Run, classified, exact_average, gained, off_average, pictures, with_rate


def vit(dtype: torch.dtype = BF16) -> Job:
    model = VisionTransformer(img_size=16, patch_size=4, num_classes=4, embed_dim=32, depth=2, num_heads=2)
    return Job(model, pictures(), classified, dtype)


def with_average(average_dtype: torch.dtype | None) -> Job:
    job = vit()
    average: list[ModelEmaV2] = []
    job.lr, job.steps = 3e-3, 120

    def update(run: Run) -> None:
        if not average:
            average.append(ModelEmaV2(run.model, decay=0.99))
            if average_dtype:
                average[0].module.to(average_dtype)
            run.extra["average"] = average[0]
        average[0].update(run.model)

    job.after, job.judged_by = [update, exact_average(0.99)], lambda run: off_average(run, average[0].module.parameters())
    return job


def average_of_vit() -> Job:
    return with_average(None)


def convnext() -> Job:
    model = ConvNeXt(num_classes=4, depths=(1, 1, 1, 1), dims=(16, 16, 16, 16), patch_size=2, kernel_sizes=3, ls_init_value=0.1)
    return Job(model, pictures(32), classified, lr=0.05, optimizer=SGD)


def mixer() -> Job:
    return Job(MlpMixer(num_classes=4, img_size=16, patch_size=4, num_blocks=2, embed_dim=32), pictures(), classified, BF16)


def resnet() -> Job:
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4, stem_width=8, channels=(8, 8, 16, 16))
    job = Job(model, pictures(rows=16), classified, pure=True, lr=0.02, optimizer=SGD)

    def in_use(run: Run) -> float:
        """The loss with the statistics that were gathered."""
        run.model.eval()
        with torch.no_grad():
            return float(run.forward(999))

    job.judged_by = in_use
    return job


def swin() -> Job:
    model = SwinTransformer(
        img_size=16, patch_size=2, num_classes=4, embed_dim=16, depths=(1, 1), num_heads=(2, 2), window_size=4, drop_path_rate=0.0
    )
    return Job(model, pictures(batches=3), classified, lr=3e-3)


def cait() -> Job:
    model = Cait(img_size=16, patch_size=4, num_classes=4, embed_dim=32, depth=2, num_heads=2, init_values=0.1)
    return Job(model, pictures(), classified, lr=0.01, optimizer=SGD, steps=40)


# ---- faults


def average_in_format(job: Job) -> None:
    """The average is kept in the low format, and 0.01 of a change is less than half a spacing."""
    other = with_average(job.dtype if job.dtype != FP32 else None)
    job.after, job.judged_by = other.after, other.judged_by


def small_loss(job: Job) -> None:
    """A loss that is small by nature, and no GradScaler: its gradients are zero in fp16."""

    def step(run: Run, i: int) -> Tensor:
        run.optimizer.zero_grad()
        loss = run.forward(i)
        (loss * 1e-8).backward()
        run.optimizer.step()
        return loss

    job.step, job.lr = step, job.lr * 1e8


def statistics_beyond(job: Job) -> None:
    gained(job.model.conv1, 5000.0)


def manual_scale(job: Job) -> None:
    """A loss scale by hand that is far too high, and nobody looks for infinity."""

    def step(run: Run, i: int) -> Tensor:
        run.optimizer.zero_grad()
        loss = run.forward(i)
        scale = 2.0**24
        (loss * scale).backward()
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad /= scale
        run.optimizer.step()
        return loss

    job.step = step


def step_without_scaler(job: Job) -> None:
    """scaler.scale, then optimizer.step as it always was."""

    def step(run: Run, i: int) -> Tensor:
        run.optimizer.zero_grad()
        loss = run.forward(i)
        run.scaler.scale(loss).backward()
        run.optimizer.step()
        return loss

    job.step = step


CASES = (
    Case("timm_vit_average_in_format", average_of_vit, average_in_format, ("ema_stagnation",), ("",)),
    Case("timm_convnext_small_loss", convnext, small_loss, ("grad_underflow_no_scaling",), ("",)),
    Case("timm_mixer_rate_too_high", mixer, with_rate(50.0, SGD), ("lr_too_high",), ("",), precision=False),
    Case(
        "timm_resnet_statistics_beyond", resnet, statistics_beyond, ("bn_stats_poisoned", "norm_square_overflow_fp16"), ("bn1",)
    ),
    Case("timm_swin_manual_scale", swin, manual_scale, ("static_loss_scale_overflow",), ("",)),
    Case("timm_cait_step_without_scaler", cait, step_without_scaler, ("step_on_scaled_gradients",), ("",)),
)

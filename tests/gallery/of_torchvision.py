"""Models of torchvision."""

from __future__ import annotations

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.mobilenetv2 import MobileNetV2
from torchvision.models.shufflenetv2 import ShuffleNetV2
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

from . import BF16, DATA, FP16, Batch, Case, Job, Run, classified, pictures


def vit() -> Job:
    model = VisionTransformer(image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=4)
    nn.init.normal_(model.heads[0].weight, std=0.1)
    return Job(model, pictures(), classified, lr=0.01, optimizer=SGD, steps=40)


def shufflenet() -> Job:
    model = ShuffleNetV2([1, 1, 1], [8, 16, 16, 16, 32], num_classes=16)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["images"]).float() - batch["images"].mean(1)[:, :4, :4].flatten(1)).square().mean()

    return Job(model, pictures(size=32), loss, lr=0.02, optimizer=SGD)


def mobilenet() -> Job:
    setting = [[1, 8, 1, 1], [2, 8, 1, 2]]
    return Job(MobileNetV2(4, width_mult=0.25, inverted_residual_setting=setting), pictures(), classified, BF16, lr=3e-3)


def convnext() -> Job:
    setting = [CNBlockConfig(16, 16, 1), CNBlockConfig(16, None, 1)]
    model = ConvNeXt(setting, layer_scale=0.1, num_classes=4)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        wanted = nn.functional.one_hot(batch["labels"], 4).float()
        return nn.functional.binary_cross_entropy_with_logits(model(batch["images"]).float(), wanted)

    return Job(model, pictures(), loss, lr=0.3, optimizer=SGD, steps=60)


def swin() -> Job:
    model = SwinTransformer([2, 2], 16, [1, 1], [2, 2], [4, 4], num_classes=4, stochastic_depth_prob=0.0)
    return Job(model, pictures(batches=3), classified, lr=3e-3)


# ---- faults


def bright_pictures(job: Job) -> None:
    """Counts of a detector, up to 200,000, given to a model in fp16."""
    job.pure = True
    sound = job.batch

    def batch(i: int) -> Batch:
        values = sound(i)
        return {**values, "images": values["images"].abs() * 1e5}

    job.batch = batch


def sum_in_format(job: Job) -> None:
    """Squares summed over the batch in fp16: no term is large, their sum is."""
    dtype = job.dtype

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        wanted = (batch["images"].mean(1) * 100)[:, ::2, ::2].flatten(1).to(dtype)
        off = (model(batch["images"]).to(dtype).repeat(1, 16) - wanted) ** 2
        return off.sum(dtype=dtype)

    job.loss, job.lr = loss, 1e-6


def logarithm_of_scores(job: Job) -> None:
    """The scores are taken for probabilities."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch["images"]).float()
        return -(scores.gather(1, batch["labels"][:, None]).log()).mean()

    job.loss = loss


def small_eps(job: Job) -> None:
    """Probabilities in fp16, guarded by 1e-8."""
    dtype = job.dtype

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        p = (model(batch["images"]) * 40).sigmoid().to(dtype)
        wanted = nn.functional.one_hot(batch["labels"], 4).to(dtype)
        return -(wanted * (p + 1e-8).log() + (1 - wanted) * (1 - p + 1e-8).log()).mean()

    job.loss = loss


def scaler_made_anew(job: Job) -> None:
    """A new GradScaler in each step begins at 65536 again and never finds a lower scale."""

    def step(run: Run, i: int) -> Tensor:
        run.scaler = GradScaler("cpu", enabled=job.dtype == FP16)
        run.optimizer.zero_grad()
        loss = run.forward(i) * 64
        run.scaler.scale(loss).backward()
        run.update()
        return loss / 64

    job.step = step


CASES = (
    Case("torchvision_vit_bright_pictures", vit, bright_pictures, ("input_out_of_range_fp16",), DATA),
    Case("torchvision_shufflenet_sum_in_format", shufflenet, sum_in_format, ("reduction_overflow_fp16", "loss_computed_in_fp16"),
         ("op:sum", "<root>", "loss")),
    Case("torchvision_mobilenet_logarithm_of_scores", mobilenet, logarithm_of_scores, ("undefined_operation",),
         ("op:log", "<root>", "loss"), precision=False),
    Case("torchvision_convnext_small_eps", convnext, small_eps, ("eps_underflow_fp16", "saturated_probability_loss"),
         ("op:log", "op:add", "<root>", "loss", "op:sigmoid")),
    Case("torchvision_swin_scaler_made_anew", swin, scaler_made_anew, ("loss_scale_pinned", "static_loss_scale_overflow"), ("",)),
)  # fmt: skip

"""Training as the libraries of others drive it: they wrap forward, copy weights, keep states in modules and replace the loop."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..program import NAN, Program, mlp, program, sick


def with_library(library: str, name: str) -> Callable[[Callable[[int], Program]], Callable[[int], Program]]:
    """A program of those who have the library."""
    there = importlib.util.find_spec(library) is not None
    return program(name, "libraries") if there else lambda build: build


def imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def scaled(model: nn.Module, loss: Callable[[int], torch.Tensor], optimizer: Any = None, **more: Any) -> Program:
    """The usual step with a scaler, which keeps the weights from what a bad step gives."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(i: int) -> Any:
        optimizer.zero_grad()
        value = loss(i)
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return value

    return Program([model], [optimizer], step, scaler=scaler, **{"steps": 5, **more})


def small_gpt(**more: Any) -> Any:
    transformers = imported("transformers")
    options: dict[str, Any] = {
        "vocab_size": 23, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1, **more,
    }  # fmt: skip
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))


def tokens(i: int, rows: int = 2, length: int = 8) -> torch.Tensor:
    return (torch.arange(rows * length) * 7 + 3 * i).remainder(21).add(2).reshape(rows, length)


@with_library("transformers", "transformers_samples_from_its_model_inside_the_step")
def samples(seed: int) -> Program:
    model = small_gpt()
    model.generation_config.pad_token_id = 0
    drawn: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            rows = model.generate(tokens(i)[:, :3], max_new_tokens=5, do_sample=True, top_k=9, temperature=1.3, num_beams=1)
        model.train()
        drawn.append(rows.tolist())
        advantage = torch.linspace(-1, 1, 2) * (NAN if i == 2 else 1)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(rows).logits[:, :-1]
        chosen = F.log_softmax(logits.float(), -1).gather(-1, rows[:, 1:, None]).squeeze(-1)
        return -(chosen.sum(-1) * advantage).mean()

    return scaled(model, loss, extra=lambda: drawn)


@with_library("transformers", "transformers_checkpoints_ties_and_grows_its_embedding")
def grows(seed: int) -> Program:
    model = small_gpt()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made = Program([model], [], lambda i: None, steps=5)

    def fresh() -> Any:
        adafactor = imported("transformers").Adafactor
        return adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True)

    now = [fresh()]

    def step(i: int) -> Any:
        if i == 3:
            model.resize_token_embeddings(29)
            now[0] = fresh()
        model.train()
        out = model(tokens(i), labels=tokens(i + 1), output_hidden_states=True, output_attentions=False)
        value = out.loss * (NAN if i == 2 else 1)
        value.backward()
        if torch.isfinite(value):
            now[0].step()
        model.zero_grad()
        return [value.detach(), out.hidden_states[-1].detach()]

    made.step = step
    made.extra = lambda: [now[0].state_dict(), model.lm_head.weight is model.transformer.wte.weight]
    return made


@with_library("transformers", "transformers_trainer_accumulates_and_evaluates_under_callbacks")
def trainer(seed: int) -> Program:
    transformers = imported("transformers")
    model = small_gpt()
    noted: list[Any] = []
    rows = [{"input_ids": tokens(i)[0], "labels": tokens(i + 1)[0]} for i in range(24)]
    made = Program([model], [], lambda i: None, extra=lambda: noted)

    def loop(watch: Any) -> None:
        class Notes(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
            def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                watch.begin(state.global_step)

            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                watch.end()
                if state.global_step == 2:
                    control.should_evaluate = True

            def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:
                noted.append(metrics["eval_loss"])

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
                noted.append({key: logs[key] for key in ("loss", "grad_norm") if key in logs})

        arguments = transformers.TrainingArguments(
            "out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, logging_steps=1, bf16=True,
            use_cpu=True, report_to=[], save_strategy="no", neftune_noise_alpha=5.0, disable_tqdm=True, seed=seed,
            lr_scheduler_type="cosine",
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=[Notes()]).train()

    made.loop = loop
    return made


@with_library("peft", "peft_merges_unmerges_and_switches_adapters_inside_the_step")
def adapters(seed: int) -> Program:
    peft = imported("peft")
    settings = peft.LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.2, use_dora=True, init_lora_weights="gaussian")
    model = peft.get_peft_model(mlp(), settings)
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["0"], lora_dropout=0.0))

    def loss(i: int) -> torch.Tensor:
        model.set_adapter("other" if i == 3 else "default")
        with model.disable_adapter(), torch.no_grad():
            reference = model(sick(i))
        with torch.no_grad():
            model.merge_adapter()
            merged = model(sick(i, 9))
            model.unmerge_adapter()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(sick(i))
        return (out.float() - merged).square().mean() + (out.float() - reference).abs().mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return scaled(model, loss, optimizer)


@with_library("accelerate", "accelerate_accumulates_and_finds_its_batch_size")
def accelerated(seed: int) -> Program:
    accelerate = imported("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3, cpu=True)
    model, optimizer = accelerator.prepare(mlp(), torch.optim.AdamW(mlp().parameters(), lr=0.05))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.05))
    tried: list[int] = []

    @accelerate.utils.find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int, i: int) -> torch.Tensor:
        tried.append(batch_size)
        rows = sick(i).repeat(batch_size // 4, 1)
        with accelerator.accumulate(model):
            value = model(rows).square().mean()
            if batch_size > 4 and i % 2 == 0:
                raise RuntimeError("CUDA out of memory.")  # as its kernels say it, after a part of the work
            accelerator.backward(value)
            if accelerator.sync_gradients and torch.isfinite(value):
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            if accelerator.sync_gradients:
                optimizer.zero_grad()
        return value

    return Program([model], [optimizer], lambda i: train(i), steps=7, extra=lambda: tried)


@with_library("accelerate", "accelerate_offloads_a_frozen_teacher_to_memory_and_disk")
def offloaded_teacher(seed: int) -> Program:
    accelerate = imported("accelerate")
    model, teacher = mlp(), nn.Sequential(mlp(), nn.Linear(4, 4))
    teacher.requires_grad_(False)
    accelerate.cpu_offload(teacher[0], execution_device="cpu", offload_buffers=True)
    accelerate.disk_offload(teacher[1], "teacher", execution_device="cpu")
    both = nn.ModuleDict({"model": model, "teacher": teacher})

    def loss(i: int) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(sick(i, 9))
        return (model(sick(i)) - wanted).square().mean()

    return scaled(both, loss, torch.optim.SGD(model.parameters(), 0.05), extra=lambda: [str(p.device) for p in both.parameters()])


@with_library("lightning", "lightning_optimizes_by_hand_with_two_optimizers_in_turns")
def by_hand(seed: int) -> Program:
    lightning = imported("lightning")
    noted: list[Any] = []
    made = Program([], [], lambda i: None, extra=lambda: noted)

    class Pair(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge = mlp(8, 8), mlp(8, 1)

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters(), lr=0.02) for part in (self.maker, self.judge)]

        def training_step(self, rows: torch.Tensor, number: int) -> None:
            watch = made.seen_by  # type: ignore[attr-defined]
            with watch.step(number):
                for optimizer, sign in zip(self.optimizers(), (-1, 1)):
                    self.toggle_optimizer(optimizer)
                    value = sign * (self.judge(rows).mean() - self.judge(self.maker(torch.randn_like(rows))).mean())
                    self.manual_backward(value)
                    self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                    if torch.isfinite(value):
                        optimizer.step()
                    optimizer.zero_grad()
                    self.untoggle_optimizer(optimizer)
                    self.log("value", value)
                    made.see(value)

    pair = Pair()
    made.models = [pair]

    def loop(watch: Any) -> None:
        made.seen_by = watch  # type: ignore[attr-defined]
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, precision="bf16-mixed", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader([sick(i)[k] for i in range(6) for k in range(4)], batch_size=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(pair, loader)
        del made.seen_by  # type: ignore[attr-defined]
        noted.append({key: float(value) for key, value in trainer.callback_metrics.items()})

    made.loop = loop
    return made


@with_library("timm", "timm_trains_a_vision_model_with_its_average_and_its_own_clipping")
def vision(seed: int) -> Program:
    timm = imported("timm")
    vit = imported("timm.models.vision_transformer").VisionTransformer
    model = vit(
        img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=4, drop_path_rate=0.3, init_values=1e-3
    )
    utils, mixup = imported("timm.utils"), imported("timm.data").Mixup(mixup_alpha=0.4, cutmix_alpha=1.0, num_classes=4)
    average = utils.ModelEmaV3(model, decay=0.8, use_warmup=True, foreach=True)
    optimizer = imported("timm.optim").create_optimizer_v2(
        model, opt="lookahead_lamb", lr=0.02, weight_decay=0.05, layer_decay=0.7
    )
    scaler = utils.NativeScaler(device="cpu")
    assert timm

    def step(i: int) -> Any:
        images = torch.randn(4, 3, 16, 16) * (NAN if i == 2 else 1)
        images, labels = mixup(images, torch.arange(4))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = torch.sum(-labels * F.log_softmax(model(images).float(), -1), -1).mean()
        scaler(value, optimizer, clip_grad=0.02, clip_mode="agc", parameters=list(model.parameters())[:-2])
        average.update(model, step=i)
        return [value, average.module.cls_token]

    return Program([model, average], [optimizer], step, steps=5, extra=scaler.state_dict)


@with_library("diffusers", "diffusers_trains_a_denoiser_and_lends_it_the_average")
def denoiser(seed: int) -> Program:
    diffusers = imported("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    model.enable_gradient_checkpointing()
    schedule = diffusers.DDPMScheduler(num_train_timesteps=20)
    average = imported("diffusers.training_utils").EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True, foreach=True)
    drawn: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        clean = torch.randn(2, 1, 8, 8)
        noise, times = torch.randn_like(clean), torch.randint(0, 20, (2,))
        value = F.mse_loss(model(schedule.add_noise(clean, noise, times), times).sample, noise) * (NAN if i == 2 else 1)
        average.step(model.parameters())
        if i == 3:
            average.store(model.parameters())
            average.copy_to(model.parameters())
            image = torch.randn(1, 1, 8, 8)
            with torch.no_grad():
                for time in schedule.timesteps[:2]:
                    image = schedule.step(model(image, time).sample, time, image).prev_sample
            drawn.append(image)
            average.restore(model.parameters())
        return value

    return scaled(model, loss, steps=4, extra=lambda: [drawn, average.shadow_params])


@with_library("torchmetrics", "torchmetrics_are_children_of_the_model_and_count_in_forward")
def metrics(seed: int) -> Program:
    torchmetrics = imported("torchmetrics")

    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()
            self.metrics = torchmetrics.MetricCollection(
                [torchmetrics.MeanSquaredError(), torchmetrics.PearsonCorrCoef(num_outputs=4), torchmetrics.R2Score()]
            )
            self.tracker = torchmetrics.MetricTracker(torchmetrics.MeanMetric(nan_strategy="ignore"), maximize=False)

        def forward(self, rows: torch.Tensor, wanted: torch.Tensor) -> Any:
            out = self.body(rows)
            each = {name: metric(out.detach(), wanted) for name, metric in self.metrics.items() if name != "R2Score"}
            self.metrics["R2Score"].update(out.detach().flatten(), wanted.flatten())
            self.tracker.increment()
            self.tracker.update(out.detach().mean())
            return F.mse_loss(out, wanted), each

    model = Measured()
    kept: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        value, each = model(sick(i), sick(i + 1, 99)[:, :4].contiguous())
        kept.append([each, model.tracker.n_steps])
        if i == 3:
            kept.append([model.metrics["R2Score"].compute(), model.tracker.compute_all()])
            model.metrics.reset()
        return value  # type: ignore[no-any-return]

    return scaled(model, loss, extra=lambda: kept)


@with_library("torchvision", "torchvision_detects_with_images_that_know_their_boxes")
def detects(seed: int) -> Program:
    tv, v2 = imported("torchvision.tv_tensors"), imported("torchvision.transforms.v2")
    ops = imported("torchvision.ops")
    change = v2.Compose([v2.RandomHorizontalFlip(0.5), v2.RandomAffine(10), v2.SanitizeBoundingBoxes(labels_getter=None)])

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                ops.Conv2dNormActivation(3, 6), ops.SqueezeExcitation(6, 2), ops.StochasticDepth(0.3, "row")
            )
            self.head = ops.MLP(6, [8, 4], dropout=0.2)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            maps = ops.drop_block2d(self.body(images), 0.2, 3)
            return self.head(maps.mean((2, 3)))  # type: ignore[no-any-return]

    model = Detector()

    def loss(i: int) -> torch.Tensor:
        boxes = tv.BoundingBoxes(torch.tensor([[1, 1, 9, 9], [3, 4, 12, 14.0]]), format="XYXY", canvas_size=(16, 16))
        image, boxes = change(tv.Image(torch.rand(3, 16, 16)), boxes)
        images = image.unsqueeze(0) * (NAN if i == 2 else 1)
        near, far = model(images).abs().split(2, 1)
        wanted = boxes.as_subclass(torch.Tensor).mean(0, keepdim=True)
        return ops.generalized_box_iou_loss(torch.cat([near, near + far + 1], 1), wanted, "sum")  # type: ignore[no-any-return]

    return scaled(model, loss)


@with_library("tensorboard", "tensorboard_draws_the_graph_and_histograms_inside_the_step")
def drawn_graph(seed: int) -> Program:
    model = nn.Sequential(mlp(), nn.Dropout(0.2), nn.Linear(4, 2))
    writer = imported("torch.utils.tensorboard").SummaryWriter(tempfile.mkdtemp(), max_queue=1, flush_secs=1)
    sizes: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        value = model(sick(i)).square().mean()
        writer.add_scalar("value", value, i)
        if i == 1:
            writer.add_graph(model, sick(i))
            writer.add_hparams({"lr": 0.01}, {"value": 1.0})
        for name, p in model.named_parameters():
            writer.add_histogram(name, p, i)
            if p.grad is not None:
                writer.add_histogram(f"{name}.grad", torch.nan_to_num(p.grad), i)
        if i == 4:
            writer.close()
            sizes.append(len(list(pathlib.Path(writer.log_dir).iterdir())))
        return value

    return scaled(model, loss, extra=lambda: sizes)


@with_library("dill", "dill_writes_functions_models_and_the_session_by_value")
def by_value(seed: int) -> Program:
    dill = imported("dill")
    model = mlp()
    scale = {"value": 2.0}
    model.register_forward_hook(lambda module, args, out: out * scale["value"])
    sizes: list[Any] = []

    def loss(i: int) -> torch.Tensor:
        whole = dill.dumps((model, lambda rows: model(rows).sum()), recurse=True, byref=False)
        sizes.append(len(whole))
        again, function = dill.loads(whole)
        value = model(sick(i)).square().mean()
        sizes.append(torch.equal(again(sick(1)), model(sick(1))))
        return value + 0 * function(sick(1)).detach()

    return scaled(model, loss, extra=lambda: sizes)


@with_library("IPython", "cells_of_a_notebook_hold_the_step_and_ask_for_their_time")
def cells(seed: int) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    made = Program([model], [optimizer], lambda i: None)
    texts = (
        "import torch\nwatch_is_open = False\nvalues = []\n",
        "def forward(i):\n    out = model(rows(i))\n    return out.square().mean()\n",
        "with watch.step(i):\n    value = forward(i)\n    value.backward()\n    if value == value:\n        optimizer.step()\n"
        "    optimizer.zero_grad()\nvalues.append(value)\nvalue\n",
        "%config InteractiveShell.ast_node_interactivity = 'all'\nvalue; _\n",
        "%time _ = forward(0)\n",
        "raise ValueError(f'{len(values)} values')\n",
    )

    def loop(watch: Any) -> None:
        shell_kind = imported("IPython.core.interactiveshell").InteractiveShell
        hook, display = sys.excepthook, sys.displayhook
        shell = shell_kind(user_ns={"model": model, "optimizer": optimizer, "rows": sick, "watch": watch})
        shell.history_manager.enabled = False
        for text in texts[:2]:
            shell.run_cell(text).raise_error()
        for i in range(5):
            shell.user_ns["i"] = i
            shell.run_cell(texts[2], store_history=False).raise_error()
        for text in texts[3:]:
            with contextlib.suppress(ValueError):
                shell.run_cell(text).raise_error()
        for value in shell.user_ns["values"]:
            made.see(value)
        shell.reset()
        shell.user_ns.clear()
        shell_kind.clear_instance()
        sys.excepthook, sys.displayhook = hook, display

    made.loop = loop
    return made


@with_library("transformers", "transformers_in_half_precision_asks_for_infinities_and_clamps")
def clamps(seed: int) -> Program:
    transformers = imported("transformers")
    settings = transformers.T5Config(
        vocab_size=23,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )
    model = transformers.T5ForConditionalGeneration(settings)

    def loss(i: int) -> torch.Tensor:
        if i == 2:
            with torch.no_grad():
                model.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(1e30)
        with torch.autocast("cpu", torch.float16):
            out = model(input_ids=tokens(i), labels=tokens(i + 1), attention_mask=tokens(i) > 5)
        if i == 2:
            with torch.no_grad():
                model.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(1e-30)
        return out.loss  # type: ignore[no-any-return]

    return scaled(model, loss, steps=4)

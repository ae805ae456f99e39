"""Frameworks that run the project's code themselves: Lightning's and Hugging Face's trainers, inside the region they open."""

from __future__ import annotations

import ast

from . import objects, settings_files
from .regions import CHOSEN_LATER
from .source import OwnClass, OwnFunction
from .torch_names import IN_FILE
from .trace import Frame, Walk
from .values import UNKNOWN, Args, Kwargs, Thing, Value, replace


def own_trainer(walk: Walk, frame: Frame, info: OwnClass, value: Value, args: Args, kwargs: Kwargs, node: ast.Call) -> Value:
    """A class of the project derived from Hugging Face's Trainer: its compute_loss runs inside the region, too."""
    model = kwargs.get("model", args[0] if args else UNKNOWN)
    asked = kwargs.get("args", args[1] if len(args) > 1 else UNKNOWN)
    if model.thing is not None:
        model.thing.is_trained = True
        frame.emit("framework.train", node, (model,), kwargs)
    framework = Value("trainer", const=asked.const, node=asked.node or node)
    loss = info.find("compute_loss")
    if loss is not None:
        _run_mixed(walk, frame, node, framework, loss, [value, model, Value(thing=Thing("inputs"))], {})
    elif model.kind == "instance":
        _run_mixed(walk, frame, node, framework, model.ref.find("forward"), [model], {})
    return value


def run_lightning(walk: Walk, frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
    """`trainer.fit(model)`: Lightning runs the steps of the model inside its autocast region."""
    model = kwargs.get("model", args[0] if args else UNKNOWN)
    frame.emit("unknown_call", node, (base, *args), kwargs)
    if name != "fit" or model.kind != "instance":
        return UNKNOWN
    assert model.thing is not None
    model.thing.is_trained = True
    frame.emit("framework.train", node, (model,), kwargs)
    region, saved = objects.mixed_region(frame, node, base), frame.at
    if region is not None:
        frame.at = frame.inside(regions=(*saved.regions, region))
    for step in ("training_step", "validation_step"):
        method = model.ref.find(step)
        if method is not None:
            frame.at = replace(frame.at, has_grad=step == "training_step")
            batch = [Value(thing=Thing(step)), Value(thing=Thing(""), dtype="int")]
            walk.follow(frame, method, [model, *batch], {}, node)
    frame.at = saved
    return UNKNOWN


def manual_backward(frame: Frame, node: ast.Call, base: Value, args: Args, kwargs: Kwargs) -> Value:
    """`self.manual_backward(loss)`: Lightning scales the loss where the step runs in its fp16 region."""
    region = next((r for r in frame.at.regions if r.is_framework), None)
    framework = Value("framework", ref="lightning", const=region.dtype if region is not None else "", thing=base.thing)
    return frame.emit("framework.backward", node, (framework, *args), kwargs)


def run_trainer(walk: Walk, frame: Frame, node: ast.Call, base: Value, name: str) -> Value:
    """`trainer.train()`: Hugging Face runs the forward of the model inside its autocast region."""
    model = base.inputs[0]
    if name != "train" or model.kind != "instance":
        return UNKNOWN
    _run_mixed(walk, frame, node, base, model.ref.find("forward"), [model], {})
    return UNKNOWN


def run_cli(walk: Walk, frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
    """`LightningCLI(Model)`: the trainer, and with it the precision, comes from a settings file."""
    frame.emit("external", node, (Value("external", ref=path), *args), kwargs)
    asked = settings_files.from_near_file(walk, frame, "LightningCLI").get(IN_FILE, UNKNOWN)
    trainer = Value("framework", ref="lightning", const=asked.const, node=asked.node or node)
    model = walk.construct(frame, args[0].ref, [], {}, node)
    return run_lightning(walk, frame, node, trainer, "fit", [model], {})


def _run_mixed(
    walk: Walk, frame: Frame, node: ast.Call, framework: Value, method: OwnFunction | None, args: Args, kwargs: Kwargs
) -> None:
    """Runs a method inside the region that a framework opens."""
    region, saved = objects.mixed_region(frame, node, framework), frame.at
    if framework.const == CHOSEN_LATER:
        region = objects.framework_region(frame, node).ref
    if method is not None and region is not None:
        frame.at = frame.inside(regions=(*saved.regions, region))
        walk.follow(frame, method, args, kwargs, node)
        frame.at = saved

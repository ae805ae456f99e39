"""A model, a loss function and sample inputs from files. Model files are code and are run; tensor files never are."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ..core.finding import NannyError
from ..core.numbers import join_names
from ..core.torch_files import damaged_file, load_torch_file
from ..watch.tensors import tensors_in

HOW_TO_SAVE = (
    "torch.save(x, 'sample.pt') for model(x), torch.save((a, b), 'sample.pt') for model(a, b), "
    "torch.save({'ids': a}, 'sample.pt') for model(ids=a)"
)
FACTORY_NAMES = ("build_model", "make_model", "create_model", "get_model", "factory", "build", "model", "Model", "net")


def load_model(spec: str) -> nn.Module:
    """`model.py:NAME`: a module, or a class or function that makes one without arguments; without NAME the obvious one."""
    path, name = _split(spec)
    namespace = vars(_run_file(path))
    chosen = name or _obvious_name(path, namespace)
    if chosen not in namespace:
        offered = _candidates(namespace)
        raise NannyError(f"{path}: has no {chosen!r}; {f'it has: {join_names(offered, 10)}' if offered else 'it has no model'}")
    made = namespace[chosen]
    if isinstance(made, nn.Module):
        return made
    if not callable(made):
        raise NannyError(f"{path}: {chosen} is a {type(made).__name__}; name a module, or a function or class that makes one")
    needed = _required_names(made)
    if needed:
        raise NannyError(
            f"{path}: {chosen} needs {', '.join(needed)}; write a function without arguments that makes the model, "
            f"and name it: --model {path}:build_model"
        )
    model = made()
    if not isinstance(model, nn.Module):
        raise NannyError(f"{path}: {chosen}() gives a {type(model).__name__}, not a torch.nn.Module")
    return model


def _split(spec: str) -> tuple[Path, str]:
    if os.path.isfile(spec):
        return Path(spec), ""
    head, _, name = spec.rpartition(":")
    if head and os.path.isfile(head):
        return Path(head), name
    raise NannyError(f"{head or spec}: there is no such file; --model takes model.py or model.py:function")


def _run_file(path: Path) -> Any:
    if path.suffix != ".py":
        raise NannyError(f"{path}: --model takes a Python file with the model's code; weights go to --weights")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # nothing appears beside a file that is only looked at
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise NannyError(f"{path}: cannot be run ({type(error).__name__}: {error})") from error
    finally:
        sys.dont_write_bytecode = writes
        sys.path.pop(0)
    return module


def _candidates(namespace: dict[str, Any]) -> list[str]:
    """Modules, module classes of this file and functions that look like factories."""
    here = namespace.get("__name__")
    out = []
    for name, value in namespace.items():
        is_class = inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == here
        is_factory = inspect.isfunction(value) and name in FACTORY_NAMES
        if not name.startswith("_") and (isinstance(value, nn.Module) or is_class or is_factory):
            out.append(name)
    return out


def _obvious_name(path: Path, namespace: dict[str, Any]) -> str:
    candidates = _candidates(namespace)
    for name in FACTORY_NAMES:
        if name in candidates:
            return name
    made = [n for n in candidates if isinstance(namespace[n], nn.Module)]
    if len(made) == 1:
        return made[0]
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise NannyError(f"{path}: has no model; define a torch.nn.Module class, or a function `build_model()` that makes one")
    raise NannyError(f"{path}: has several models; name one: --model {path}:NAME, with NAME one of: {join_names(candidates, 10)}")


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def _required_names(function: Any) -> list[str]:
    return [p.name for p in _parameters(function) if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def load_function(spec: str) -> Callable[..., Any]:
    """`file.py:fn` or `package.module:fn`."""
    head, _, name = spec.rpartition(":")
    if not head:
        raise NannyError(f"--loss {spec}: name a function as file.py:function or package.module:function")
    if os.path.isfile(head):
        module = _run_file(Path(head))
    else:
        try:
            module = importlib.import_module(head)
        except ImportError as error:
            raise NannyError(f"--loss {spec}: {head} can neither be found as a file nor imported ({error})") from None
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise NannyError(f"--loss {spec}: {head} has no function {name!r}")
    return function


def load_weights(model: nn.Module, file: str) -> None:
    state = _load(Path(file))
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise NannyError(f"{file}: does not fit the model ({str(error).strip().splitlines()[-1].strip()})") from None


def load_sample(
    file: str | None, target_spec: str | None, model: nn.Module, loss_fn: Callable[..., Any] | None
) -> tuple[Any, Any]:
    """What the model takes, and the target of the loss: from its own file, or beside the input in the sample file."""
    takes = [p.name for p in _parameters(model.forward) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if file is None:
        call = f"{type(model).__name__}.forward({', '.join(takes)})"
        raise NannyError(f"--input is missing: a file with what {call} takes. Save one with {HOW_TO_SAVE}")
    sample = _load(Path(file))
    if not tensors_in(sample):
        raise NannyError(f"{file}: holds no tensor; save one with {HOW_TO_SAVE}")
    target = None
    batches = sample if isinstance(sample, list) else [sample]
    if "target" not in takes and all(isinstance(b, dict) and set(b) == {"input", "target"} for b in batches):
        inputs, targets = [b["input"] for b in batches], [b["target"] for b in batches]
        sample, target = (inputs, targets) if isinstance(sample, list) else (inputs[0], targets[0])
    if target_spec is not None:
        target = load_target(target_spec)
    if target is not None and target_spec is not None and loss_fn is None:
        raise NannyError("--target needs --loss: the function that takes the output and the target")
    if target is None and loss_fn is not None and len(_required_names(loss_fn)) > 1:
        raise NannyError(
            f"the loss function takes {', '.join(_required_names(loss_fn))}, but there is no target; give it with --target FILE, "
            f"or save the sample as torch.save({{'input': x, 'target': y}}, 'sample.pt')"
        )
    return sample, target


def load_target(spec: str) -> Any:
    """`FILE`, or `FILE:key` of a dict in it."""
    file, _, key = (spec, "", "") if os.path.isfile(spec) else spec.rpartition(":")
    held = _load(Path(file or spec))
    if not key:
        return held
    if not isinstance(held, dict) or key not in held:
        offered = join_names([str(k) for k in held], 10) if isinstance(held, dict) else f"no keys, but a {type(held).__name__}"
        raise NannyError(f"{file}: has no {key!r}; it has {offered}")
    return held[key]


def check_saved(path: str | Path) -> None:
    """Refuses a file that is not there, before anything runs."""
    if not os.path.isfile(path):
        raise NannyError(f"{path}: there is no such file; save one with {HOW_TO_SAVE}")


def _load(path: Path) -> Any:
    check_saved(path)
    if path.stat().st_size == 0:
        raise NannyError(f"{path}: the file is empty; save one with {HOW_TO_SAVE}")
    if path.suffix != ".safetensors":
        return load_torch_file(path)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError):
        raise damaged_file(path, "safetensors") from None

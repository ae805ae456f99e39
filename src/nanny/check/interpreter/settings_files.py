"""Settings files that the code names, or that lie beside it, as values whose parts know their lines."""

from __future__ import annotations

import ast
from typing import Any

from .torch_names import IN_FILE
from .trace import Frame, Walk
from .values import NOTHING, UNKNOWN, Args, Kwargs, Value, ancestors, replace

LOADERS = frozenset(
    ("json.load", "json.loads", "yaml.safe_load", "yaml.load", "yaml.full_load", "tomllib.load", "tomllib.loads", "toml.load",
     "tomli.load", "omegaconf.OmegaConf.load", "OmegaConf.load")
)  # fmt: skip


# what makes an object with attributes of a dict of settings
WRAPPERS = frozenset(
    ("easydict.EasyDict", "addict.Dict", "munch.Munch", "munch.munchify", "box.Box", "omegaconf.OmegaConf.create",
     "omegaconf.OmegaConf.structured", "omegaconf.OmegaConf.to_container", "omegaconf.DictConfig", "ml_collections.ConfigDict",
     "argparse.Namespace", "types.SimpleNamespace", "builtins.vars", "dataclasses.asdict")
)  # fmt: skip
BY_FILE = {
    "accelerate.Accelerator": ("accelerate", "mixed_precision"),
    "accelerate.accelerator.Accelerator": ("accelerate", "mixed_precision"),
    "LightningCLI": ("lightning", "precision"),
}


def named_file(walk: Walk, frame: Frame, name: str) -> Value | None:
    """What a settings file that the code names says, as a value whose parts know their lines."""
    read = getattr(walk.project.sources, "settings", None)
    found = read(name, frame.module.filename) if read is not None else None
    if found is None:
        return None
    path, data, spans = found

    def value_of(item: Any, at: tuple[str | int, ...]) -> Value:
        node = ast.Constant(value=None, lineno=spans.get(at, (1,))[0], col_offset=0)
        node.file = path  # type: ignore[attr-defined]
        if isinstance(item, dict):
            return Value("dict", ref={str(k): value_of(v, (*at, str(k))) for k, v in item.items()}, node=node)
        if isinstance(item, list):
            return Value("list", inputs=tuple(value_of(v, (*at, n)) for n, v in enumerate(item)), node=node)
        return Value("const", const=item, node=node)

    return value_of(data, ())


def wrapped(args: Args, kwargs: Kwargs) -> Value | None:
    """What such an object holds: the dict, or the instance, that it is made of."""
    if kwargs and not args:
        return Value("dict", ref=dict(kwargs))
    given = args[0] if args else UNKNOWN
    return given if given.kind in ("dict", "instance") or (given.thing is not None and given.thing.kind == "options") else None


def composed(walk: Walk, frame: Frame, kwargs: Kwargs) -> Value | None:
    """What `@hydra.main(config_path="conf", config_name="train")` gives: the file, and those that its defaults list names."""
    folder, name = (kwargs[key].const if key in kwargs else NOTHING for key in ("config_path", "config_name"))
    if not isinstance(name, str):
        return None
    folder = f"{folder}/" if isinstance(folder, str) else ""
    own = named_file(walk, frame, f"{folder}{name.removesuffix('.yaml')}.yaml")
    if own is None or not isinstance(own.ref, dict):
        return None
    parts: dict[str, Value] = {}
    for entry in own.ref["defaults"].inputs if "defaults" in own.ref else ():
        for group, option in entry.ref.items() if isinstance(entry.ref, dict) else ():
            found = named_file(walk, frame, f"{folder}{group}/{option.const}.yaml")
            if found is not None:
                parts[group] = found
    for key, value in own.ref.items():
        known = parts.get(key)
        if known is not None and isinstance(known.ref, dict) and isinstance(value.ref, dict):
            value = replace(known, ref={**known.ref, **value.ref})
        parts[key] = value
    return replace(own, ref=parts)


def from_near_file(walk: Walk, frame: Frame, path: str) -> dict[str, Value]:
    """What the one settings file of a framework near the code says about its precision, as the argument IN_FILE."""
    near = getattr(walk.project.sources, "settings_near", None)
    found = near(frame.module.filename, *BY_FILE[path]) if near is not None else []
    if len(found) != 1:
        return {}
    value, file, row = found[0]
    node = ast.Constant(value=value, lineno=row, col_offset=0)
    node.file = file  # type: ignore[attr-defined]
    return {IN_FILE: Value("const", const=value, node=node)}


def loaded_value(walk: Walk, frame: Frame, args: Args) -> Value | None:
    """`yaml.safe_load(open("train.yaml"))`: the one file that is named in it."""
    names = [v.const for a in args for v in ancestors(a, 12) if isinstance(v.const, str) and v.sure]
    named = [name for name in names if name.endswith((".json", ".yaml", ".yml", ".toml"))]
    return named_file(walk, frame, named[0]) if len(named) == 1 else None

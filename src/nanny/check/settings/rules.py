"""Rules on settings files. Each takes one `SettingsSection` and yields `Problem`s at its keys.

Their codes are those of rules on code, whose pages say what and why; the docstrings here add what is looked at in files.
Not in the folder of those: a check of Python code does not need them, and starts faster without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.finding import NannyError, Severity
from ...core.formats import FORMATS, format_of
from ..registry import all_rules, limits, rule
from .sections import Problem, SettingsSection

all_rules()  # the page of a code is that of its first rule, and those on code come first

SCALE_KEYS = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
KNOWN_FP16 = frozenset((*SCALE_KEYS, "consecutive_hysteresis", "fp16_master_weights_and_grads", "enabled", "auto_cast"))
OTHER_NAMES = {  # of GradScaler, apex, Megatron and fairseq -> of DeepSpeed
    "init_scale": "initial_scale_power (the power of two: 16 for 65536)",
    "initial_scale": "initial_scale_power (the power of two: 16 for 65536)",
    "initial_loss_scale": "initial_scale_power (the power of two: 16 for 65536)",
    "growth_interval": "loss_scale_window",
    "scale_window": "loss_scale_window",
    "dynamic_loss_scale": "loss_scale: 0",
    "min_scale": "min_loss_scale",
}
SCALE_WORDS = frozenset({"scale", "hysteresis", "growth", "backoff"})
TRAINS_FEW = frozenset({"lora", "qlora", "dora", "peft", "adapter", "adapters", "4bit", "8bit", "quantization"})


def is_on(value: Any) -> bool:
    """Surely on: `"auto"` and a template's `${fp16}` are not."""
    return value is True or str(value).lower() in ("true", "yes", "on", "1")


def is_off(value: Any) -> bool:
    return value is None or value is False or str(value).lower() in ("false", "no", "off", "0", "none", "null")


def number(value: Any) -> float | None:
    """YAML reads 1e-8 as a string; None for what is no number."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def half_name(value: Any) -> str:
    """fp16 or bf16, else nothing."""
    text = str(value).strip().lower()
    text = {"bfp16": "bf16", "torch.half": "fp16"}.get(text, text)
    try:
        name = format_of(text).name
    except NannyError:
        return ""
    return name if name in ("fp16", "bf16") else ""


def _later(settings: SettingsSection, *keys: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the first, the last) of two places in the file."""
    first, last = sorted(keys, key=lambda key: settings.span(*key))
    return first, last


@rule("CONFIG_FP16_AND_BF16", Severity.ERROR, on="settings")
def fp16_and_bf16(settings: SettingsSection) -> Iterator[Problem]:
    """`fp16.enabled` and `bf16.enabled` in DeepSpeed JSON, `fp16` and `bf16` in training arguments (also against a
    DeepSpeed section inside them), the old key `fp16` beside `mixed_precision: bf16` in Accelerate YAML. `"auto"`
    counts as off.
    """
    pairs: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    if settings.framework == "deepspeed":
        pairs = [(("fp16", "enabled"), (name, "enabled")) for name in ("bf16", "bfloat16")]
    elif settings.framework == "hf":
        pairs = [(("fp16",), ("bf16",)), (("fp16_full_eval",), ("bf16_full_eval",))]
        pairs += [((one,), ("deepspeed", other, "enabled")) for one, other in (("fp16", "bf16"), ("bf16", "fp16"))]
    for one, other in pairs:
        if is_on(settings.get(*one)) and is_on(settings.get(*other)):
            first, last = _later(settings, one, other)
            yield Problem(
                last,
                f"`{'.'.join(last)}` is on although `{'.'.join(first)}` is on too (line {settings.row(*first)})",
                "Turn one of them off: bf16 on hardware that has it (no loss scale needed), else fp16.",
                is_proven=True,
            )
    if settings.framework == "accelerate" and is_on(settings.get("fp16")):
        chosen = settings.get("mixed_precision")
        if half_name(chosen) == "bf16":
            first, last = _later(settings, ("fp16",), ("mixed_precision",))
            yield Problem(
                last,
                f"`mixed_precision: bf16` and `fp16: true` contradict each other (lines {settings.row(*first)} and "
                f"{settings.row(*last)})",
                "Delete the old key `fp16`; `mixed_precision` alone decides.",
                is_proven=True,
            )


@rule("CONFIG_TRUE_HALF", Severity.WARNING, on="settings")
def true_half(settings: SettingsSection) -> Iterator[Problem]:
    """`precision: 16-true` and `bf16-true` in Lightning YAML; `fp16_master_weights_and_grads` (and its bf16 twin)
    in DeepSpeed JSON; `torch_dtype` in half or `pure_bf16` in training arguments that fine-tune all weights without
    DeepSpeed or FSDP; `downcast_bf16` on TPUs in Accelerate YAML.
    """
    if settings.framework == "lightning":
        yield from _lightning_true_half(settings)
    elif settings.framework == "deepspeed":
        for name, key in (("fp16", "fp16_master_weights_and_grads"), ("bf16", "bf16_master_weights_and_grads")):
            if is_on(settings.get(name, key)) and not is_off(settings.section(name).get("enabled", False)):
                yield Problem(
                    (name, key),
                    f"`{key}` keeps the master weights in {name}: updates below {_lost_below(name)} of a weight are lost",
                    f"Delete `{key}`; if memory is short, offload the optimizer (`zero_optimization.offload_optimizer`).",
                )
    elif settings.framework == "hf":
        yield from _trainer_true_half(settings)
    elif is_on(settings.get("downcast_bf16")) and str(settings.get("distributed_type")).upper() in ("TPU", "XLA"):
        yield Problem(
            ("downcast_bf16",),
            "`downcast_bf16` on a TPU turns every float32 tensor into bf16, the parameters and Adam's state included",
            "Set `downcast_bf16: 'no'`; `mixed_precision: bf16` already computes in bf16 and keeps float32 weights.",
        )


def _lightning_true_half(settings: SettingsSection) -> Iterator[Problem]:
    precision = str(settings.get("precision")).strip()
    name = {"16-true": "fp16", "bf16-true": "bf16"}.get(precision)
    if name:
        yield Problem(
            ("precision",),
            f"`precision: {precision}` keeps the parameters in {name}: updates below {_lost_below(name)} of a weight are lost"
            + (", and there is no loss scaling" if name == "fp16" else ""),
            f"Use `precision: {precision.split('-')[0]}-mixed`; it computes in {name} and keeps float32 weights.",
        )


def _trainer_true_half(settings: SettingsSection) -> Iterator[Problem]:
    """DeepSpeed and FSDP keep float32 weights by themselves, adapters are created in float32."""
    words = {word for key in (*settings.data, settings.get("finetuning_type")) for word in str(key).lower().split("_")}
    if not TRAINS_FEW.isdisjoint(words) or settings.get("deepspeed") or settings.get("fsdp"):
        return
    for key in ("torch_dtype", "dtype", "model_dtype"):
        name = half_name(settings.get(key))
        if not name or is_off(settings.data.get("do_train", True)):
            continue
        scaled = name == "fp16" and is_on(settings.get("fp16"))
        yield Problem(
            (key,),
            f"possible: `{key}: {settings.get(key)}` loads the weights that are trained in {name}, without a float32 copy: "
            + ("`fp16: true` then stops at the first step (FP16 gradients cannot be unscaled)" if scaled else "")
            + ("" if scaled else f"updates below {_lost_below(name)} of a weight are lost")
            + "; whether the launcher brings DeepSpeed or FSDP, which keep a copy, is not known",
            f"Load the weights in float32 and let `{name}: true` do the casting.",
        )
    if is_on(settings.get("pure_bf16")):
        yield Problem(
            ("pure_bf16",),
            f"`pure_bf16` keeps the trained weights in bf16: updates below {_lost_below('bf16')} of a weight are lost",
            "Use `bf16: true`; it computes in bf16 and keeps float32 weights.",
        )


def _lost_below(name: str) -> str:
    """An update below half of the smallest spacing, as a share of the weight, always rounds away."""
    return f"{FORMATS[name].unit_roundoff / 2 * 100:.1g} %"


@rule("CONFIG_LOSS_SCALE", Severity.WARNING, on="settings")
def loss_scale(settings: SettingsSection) -> Iterator[Problem]:
    """In DeepSpeed JSON, and in the strategy of Lightning YAML: a fixed scale of 1, a power that is really a scale,
    a window that doubles the scale every few steps, a hysteresis of 0 (the scale never comes down), a floor above
    the start, loss-scale keys that are unknown, misplaced, given to bf16 or without `enabled`.
    """
    if settings.framework == "deepspeed":
        fp16 = settings.section("fp16")
        if fp16 and not is_off(fp16.get("enabled", "not set")):
            yield from scale_values(("fp16",), fp16)
            yield from _without_enabled(settings, fp16)
        yield from _strange_keys(settings)
    elif settings.framework == "lightning":
        strategy = settings.section("strategy")
        if str(strategy.get("class_path", strategy.get("_target_", ""))).rpartition(".")[2] == "DeepSpeedStrategy":
            inside = ("strategy", "init_args") if isinstance(strategy.get("init_args"), Mapping) else ("strategy",)
            yield from scale_values(inside, settings.section(*inside))
        yield from _scaler_for_bf16(settings)


def scale_values(at: tuple[str, ...], values: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with the loss scale of DeepSpeed's fp16 section, in a file or written in code."""
    for key in SCALE_KEYS:
        if key in values and values[key] != "auto" and number(values[key]) is None:
            yield Problem(
                (*at, key),
                f"`{key}` is {values[key]!r}, not a number",
                "`loss_scale: 0` is dynamic scaling." if key == "loss_scale" else f"Give a number, or delete `{key}`.",
                Severity.ERROR,
            )
    fixed = number(values.get("loss_scale")) or 0.0
    if fixed < 0:
        yield Problem((*at, "loss_scale"), f"`loss_scale` is {fixed:g}", "Use 0, dynamic scaling.", Severity.ERROR)
    elif 0 < fixed <= limits().init_scale_low:
        flushed = FORMATS["fp16"].flush_at
        yield Problem(
            (*at, "loss_scale"),
            f"`loss_scale: {fixed:g}` is a fixed scale that moves no gradient up: those below {flushed:.2g} become 0 in fp16",
            "Use `loss_scale: 0` (dynamic).",
        )
    elif fixed > limits().fixed_scale_high:
        yield Problem(
            (*at, "loss_scale"),
            f"`loss_scale: {fixed:g}` is fixed: a gradient above {FORMATS['fp16'].max / fixed:.2g} overflows in every step",
            "Use `loss_scale: 0` (dynamic).",
        )
    if fixed == 0:
        yield from _dynamic_values(at, values)


def _dynamic_values(at: tuple[str, ...], values: Mapping[str, Any]) -> Iterator[Problem]:
    power, window = number(values.get("initial_scale_power")), number(values.get("loss_scale_window"))
    lowest, patience = number(values.get("min_loss_scale")), number(values.get("hysteresis"))
    if power is not None and not 0 < power <= limits().scale_power_high:
        impossible = power > FORMATS["fp32"].max_exponent
        yield Problem(
            (*at, "initial_scale_power"),
            f"`initial_scale_power: {power:g}` starts with a scale of 2**{power:g}"
            + (", more than float32 can hold; the key takes the power, not the scale" if impossible else ""),
            "Use 16, a scale of 65536.",
            Severity.ERROR if impossible else None,
        )
    if window is not None and window <= 0:
        text = f"`loss_scale_window: {window:g}` is not a number of steps"
        yield Problem((*at, "loss_scale_window"), text, "Use 1000 (the default).", Severity.ERROR)
    elif window is not None and window < limits().growth_interval_low:
        yield Problem(
            (*at, "loss_scale_window"),
            f"`loss_scale_window: {window:g}` doubles the scale every {window:g} steps; each time it is too high a step is "
            f"skipped, up to {1 / window:.0%} of all",
            "Use 1000 (the default).",
        )
    if patience is not None and patience < 1:
        yield Problem(
            (*at, "hysteresis"),
            f"`hysteresis: {patience:g}`: DeepSpeed counts down to 1 before it lowers the scale, so it never does",
            "Use 2 (the default) or 1.",
            Severity.ERROR,
        )
    if lowest is not None and lowest <= 0:
        text = f"`min_loss_scale: {lowest:g}` is no floor: a run that only overflows goes on with a scale of almost 0, and no end"
        yield Problem((*at, "min_loss_scale"), text, "Use 1 (the default).")
    elif lowest is not None and power is not None and 0 < power <= limits().scale_power_high and lowest >= 2**power:
        yield Problem(
            (*at, "min_loss_scale"),
            f"`min_loss_scale: {lowest:g}` is not below the first scale 2**{power:g}: it cannot come down, and DeepSpeed ends a "
            "run that overflows at its floor",
            "Use 1 (the default).",
            Severity.ERROR,
        )


def _without_enabled(settings: SettingsSection, fp16: Mapping[str, Any]) -> Iterator[Problem]:
    other = settings.section("bf16") or settings.section("bfloat16")
    if "enabled" not in fp16 and any(key in fp16 for key in SCALE_KEYS) and is_off(other.get("enabled")):
        yield Problem(
            ("fp16",),
            "`fp16` has loss-scale keys but no `enabled`, and DeepSpeed's default is false: the run stays in float32",
            'Add `"enabled": true`, or delete the section.',
        )


def _strange_keys(settings: SettingsSection) -> Iterator[Problem]:
    """Loss-scale keys that DeepSpeed does not know there. Its sections refuse unknown keys, its top level ignores them."""
    for name in ("fp16", "bf16", "bfloat16"):
        section = settings.section(name)
        known = KNOWN_FP16 if name == "fp16" else frozenset(("enabled",))
        strange = [key for key in section if key not in known and not SCALE_WORDS.isdisjoint(key.split("_"))]
        if name != "fp16" and strange:  # one mistake, however many keys were copied
            keys = ", ".join(f"`{key}`" for key in strange)
            message = f"DeepSpeed knows no key {keys} in `{name}`: recent versions refuse to start, older ones ignore it"
            yield Problem((name, strange[0]), message, "Delete it: bf16 has float32's range and needs no loss scale.")
            continue
        for key in strange:
            better = OTHER_NAMES.get(key, "")
            hint = f"The key is called {better}." if better else "Delete it; known are: " + ", ".join(SCALE_KEYS) + "."
            message = f"DeepSpeed knows no key `{key}` in `{name}`: recent versions refuse to start, older ones ignore it"
            yield Problem((name, key), message, hint)
    loose = [key for key in SCALE_KEYS if key in settings.data]
    if loose:
        keys = ", ".join(f"`{key}`" for key in loose)
        yield Problem((loose[0],), f"{keys} at the top level: ignored by DeepSpeed", "Move what is meant into `fp16`.")


def _scaler_for_bf16(settings: SettingsSection) -> Iterator[Problem]:
    plugins = settings.get("plugins")
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        arguments = plugin.get("init_args", plugin) if isinstance(plugin, Mapping) else {}
        precision = str(arguments.get("precision")) if isinstance(arguments, Mapping) else ""
        if precision.startswith("bf16") and arguments.get("scaler"):
            yield Problem(
                ("plugins",),
                f"a gradient scaler is given for `precision: {precision}`; Lightning refuses it",
                "Delete the scaler: bf16 has float32's range and needs no loss scale.",
                Severity.ERROR,
            )


@rule("CONFIG_DOUBLE_SCALING", Severity.ERROR, on="settings")
def double_scaling(settings: SettingsSection) -> Iterator[Problem]:
    """DeepSpeed's `fp16` together with `amp` or `torch_autocast`: both scale the loss."""
    if settings.framework != "deepspeed" or not is_on(settings.get("fp16", "enabled")):
        return
    for other in ("amp", "torch_autocast"):
        if is_on(settings.get(other, "enabled")):
            first, last = _later(settings, ("fp16", "enabled"), (other, "enabled"))
            yield Problem(
                last,
                f"`{'.'.join(last)}` and `{'.'.join(first)}` (line {settings.row(*first)}) both scale the loss",
                f"Keep `fp16` and turn `{other}` off, or the other way round.",
            )


@rule("CONFIG_REDUCE_DTYPE", Severity.WARNING, on="settings")
def reduce_dtype(settings: SettingsSection) -> Iterator[Problem]:
    """`communication_data_type` and `data_types.grad_accum_dtype` in DeepSpeed JSON, `reduce_dtype` of an FSDP
    strategy in Lightning YAML, `mixed_precision_reduce` in the TOML of torchtitan.
    """
    found: list[tuple[str, ...]] = []
    if settings.framework == "deepspeed":
        found = [("communication_data_type",), ("data_types", "grad_accum_dtype")]
    elif settings.framework == "lightning":
        found = [("strategy", *inner, "mixed_precision", *inner, "reduce_dtype") for inner in ((), ("init_args",))]
    elif settings.framework == "titan":
        found = [("mixed_precision_reduce",)]
    for keys in found:
        name = half_name(settings.get(*keys))
        if name:
            parts = "micro-batches" if keys[-1] == "grad_accum_dtype" else "ranks"
            yield Problem(
                keys,
                f"`{keys[-1]}: {settings.get(*keys)}` sums the gradients of all {parts} in {name}",
                "Use fp32; the sum is then rounded once, at its end.",
            )

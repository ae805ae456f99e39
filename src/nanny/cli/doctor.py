"""`nanny doctor`: versions, devices, what autocast can do here, and which command lacks what.

torch is looked at in a process of its own: a torch that is missing, broken or hangs is then a line of the report, not its end.
Exit code 1 if something is missing or broken that watching a run needs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import __version__
from ..core.command_line import add_result, command_parser, terminal_language, write_result
from ..core.numbers import amount
from ..core.plain_json import to_text
from ..show.translation import translate

NAMES = 13  # columns of the names of extras
PROBE_SECONDS = 120  # the first import of torch from a network disk takes its time
WAL_BUG_UNTIL = (3, 51, 2)


@dataclass(frozen=True)
class Extra:
    """Optional packages and what in this version needs them."""

    name: str
    packages: tuple[str, ...]  # as pip knows them; imported under the same name
    command: str  # of `nanny`
    purpose: str


EXTRAS = (
    Extra("plot", ("matplotlib",), "plot", "charts as image files"),
    Extra("card", ("resvg_py",), "card", "the picture of a run as PNG"),
    Extra("fix", ("libcst",), "check --fix", "mending what the checker finds"),
    Extra("lsp", ("pygls", "libcst"), "lsp", "the checker in an editor"),
    Extra("mcp", ("mcp",), "mcp", "answering an assistant over MCP"),
    Extra("otel", ("opentelemetry",), "run", "numbers and findings to OpenTelemetry"),
    Extra("export", ("pyarrow", "fsspec", "tensorboard"), "export", "export to parquet and tensorboard"),
    Extra("fleet", ("duckdb", "pyarrow", "fsspec"), "summary", "questions to a dataset of many ranks"),
)
PIP_NAMES = {"resvg_py": "resvg-py", "opentelemetry": "opentelemetry-sdk"}


def installed_version(package: str) -> str | None:
    """Its version, None if it cannot be imported from here."""
    try:
        if importlib.util.find_spec(package) is None:
            return None
        return version(PIP_NAMES.get(package, package))
    except PackageNotFoundError:
        return "unknown version"


def examine_extra(extra: Extra) -> dict[str, Any]:
    found = {package: installed_version(package) for package in extra.packages}
    return {
        "name": extra.name,
        "installed": {name: number for name, number in found.items() if number is not None},
        "missing": [name for name, number in found.items() if number is None],
        "used_by": f"nanny {extra.command}: {extra.purpose}",
        "install": f"pip install 'precision-nanny[{extra.name}]'",
    }


def probe_torch() -> dict[str, Any]:
    """Runs where torch can be imported: its version, its threads, and each device really tried."""
    import torch

    kinds = ["cpu"]
    if torch.cuda.is_available():
        kinds += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        kinds.append("mps")
    if torch.xpu.is_available():
        kinds += [f"xpu:{i}" for i in range(torch.xpu.device_count())]
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "devices": [_probe_device(kind) for kind in kinds],
    }


def _probe_device(name: str) -> dict[str, Any]:
    import torch

    kind = name.partition(":")[0]
    if kind == "cuda":
        title = torch.cuda.get_device_name(name)
    elif kind == "xpu":
        title = torch.xpu.get_device_name(name)
    else:
        title = platform.processor() or platform.machine()
    return {
        "device": name,
        "title": title,
        "bf16": _in_hardware(kind),
        "autocast": {str(dtype).removeprefix("torch."): _try_autocast(name, dtype) for dtype in (torch.float16, torch.bfloat16)},
    }


def _in_hardware(kind: str) -> bool | None:
    """Does the device itself compute in bf16? None where torch does not tell."""
    import torch

    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if kind == "cpu" and platform.machine() in ("x86_64", "AMD64"):
        probes = [getattr(torch.cpu, f"_is_{unit}_supported", None) for unit in ("avx512_bf16", "amx_tile")]
        return any(probe() for probe in probes if probe) if any(probes) else None
    return None


def _try_autocast(device: str, dtype: Any) -> str:
    """ "yes" if a matrix product came out in the type and right, else what happened instead."""
    import torch

    matrix = torch.full((8, 8), 0.5, device=device)
    try:
        with torch.autocast(device.partition(":")[0], dtype=dtype):
            product = matrix @ matrix
    except RuntimeError as error:
        return f"no: {str(error).splitlines()[0]}"
    if product.dtype != dtype:
        return f"no: the product is {str(product.dtype).removeprefix('torch.')}"
    return "yes" if bool((product.float() == 2.0).all()) else "no: the product is wrong"


def ask_torch() -> dict[str, Any]:
    """What `probe_torch` says in a process of its own, or {"error": why it could not}."""
    command = "import json; from nanny.cli.doctor import probe_torch; print(); print(json.dumps(probe_torch()))"
    try:
        done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PROBE_SECONDS} s"}
    if done.returncode < 0:
        return {"error": f"the process died of signal {-done.returncode}"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit code {done.returncode}"}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def examine() -> dict[str, Any]:
    """Everything the report says, as plain data."""
    torch = ask_torch()
    core = {name: installed_version(name) for name in ("torch", "numpy", "safetensors")}
    return {
        "nanny": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": core,
        "sqlite": {"version": sqlite3.sqlite_version, "two_writers_unsafe": sqlite3.sqlite_version_info <= WAL_BUG_UNTIL},
        "torch": torch,
        "extras": [examine_extra(extra) for extra in EXTRAS],
        "problems": list(_problems(core, torch)),
    }


def _problems(core: dict[str, str | None], torch: dict[str, Any]) -> Iterator[dict[str, str]]:
    for name, number in core.items():
        if number is None:
            yield {"what": f"{name} is not installed", "fix": f"pip install {name}"}
    if "error" in torch and core["torch"] is not None:
        fix = "pip install --force-reinstall torch"
        yield {"what": f"torch is installed but does not work: {torch['error']}", "fix": fix}


def render(report: dict[str, Any], lang: str = "en") -> str:
    return "\n".join(_in_language(line, lang) for line in _lines(report))


def _in_language(line: str, lang: str) -> str:
    """Names of extras stand in a column of their own, before what is said of them."""
    if lang == "en":
        return line
    name, said = (line[:NAMES], line[NAMES:]) if line.startswith("  ") and line[NAMES - 1 : NAMES] == " " else ("", line)
    lead = said[: len(said) - len(said.lstrip())]
    return name + lead + translate(said.strip(), lang)


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [f"nanny {report['nanny']}, python {report['python']}, {report['platform']}"]
    lines.append("  ".join(f"{name} {number or 'MISSING'}" for name, number in report["packages"].items()))
    lines += ["", "device", *_device_lines(report["torch"], report["cpus"])]
    lines += ["", "store", f"  SQLite {report['sqlite']['version']}"]
    if report["sqlite"]["two_writers_unsafe"]:
        until = ".".join(map(str, WAL_BUG_UNTIL))
        lines.append(
            f"  up to {until} it can damage a file that two programs write at once; nanny writes each file from one place"
        )
    lines += ["", "extras", *_extra_lines(report["extras"])]
    return [*lines, "", *_closing(report)]


def _device_lines(torch: dict[str, Any], cpus: int) -> list[str]:
    if "error" in torch:
        return [f"  unknown, torch does not load: {torch['error']}"]
    lines = [f"  {amount(cpus, 'CPU')} to use, torch runs {amount(torch['threads'], 'thread')}"]
    for device in torch["devices"]:
        hardware = {True: "bf16 in hardware", False: "bf16 only emulated (slow)", None: ""}[device["bf16"]]
        lines.append("  " + ", ".join(part for part in (device["device"], device["title"], hardware) if part))
        lines += [f"    autocast {dtype}: {answer}" for dtype, answer in device["autocast"].items()]
    return lines


def _extra_lines(extras: list[dict[str, Any]]) -> list[str]:
    lines = []
    for extra in extras:
        have = ", ".join(f"{name} {number}" for name, number in extra["installed"].items())
        if extra["missing"]:
            lines.append(f"  {extra['name']:<10} {' and '.join(extra['missing'])} missing for {extra['used_by']}")
            lines.append(f"  {'':<10} to get it: {extra['install']}")
        else:
            lines.append(f"  {extra['name']:<10} {have} ({extra['used_by']})")
    return lines


def _closing(report: dict[str, Any]) -> list[str]:
    if not report["problems"]:
        return ["All that the commands without extras need is there. Next: nanny demo"]
    lines = [f"WRONG: {problem['what']}; to repair: {problem['fix']}" for problem in report["problems"]]
    return [*lines, "nanny check works all the same, and what only reads recorded runs does as far as numpy is there."]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("doctor", "Versions, devices, and what is missing for which command.")
    add_result(parser, ("text", "json"), "what is said")
    args = parser.parse_args(argv)
    report = examine()
    write_result(to_text(report) if args.format == "json" else render(report, terminal_language(args.lang)), args.output)
    return 1 if report["problems"] else 0

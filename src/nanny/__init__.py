"""nanny: says what goes wrong numerically in a mixed-precision PyTorch run, where, why, and what to change.

Names are resolved when they are first used: `import nanny` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Finding": "core.finding",
    "NannyError": "core.finding",
    "NannyWarning": "core.finding",
    "Severity": "core.finding",
    "analyze_tensor": "tensor.run",
    "auto_diff": "diff.run",
    "DiffReport": "diff.records",
    "TensorReport": "tensor.records",
    "MixedPrecisionNanny": "monitor.watch",
    "watch_model": "monitor.watch_lightly",
    "check_loss_scale": "monitor.watch_lightly",
    "check_policy_mismatch": "diagnose.policy_mismatch",
    "diagnose": "diagnose.run",
    "examine": "monitor.watch",
    "Diagnosis": "diagnose.records",
    "check_model": "check.files",
    "CompareWithCPU": "ops.watch",
    "NanInfTracker": "ops.watch",
    "ModuleInfo": "ops.watch",
    "open_module_tracker": "ops.watch",
    "compare_for_single_op": "ops.replay",
    "nan_inf_track_for_single_op": "ops.replay",
    "sanitize": "examine.run",
    "live_cell": "web.notebook",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nanny' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"nanny.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

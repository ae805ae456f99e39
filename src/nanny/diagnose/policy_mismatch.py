"""`check_policy_mismatch`: do the log-probabilities of training and of the rollout engine belong to the same policy?

In RL the rollout engine and the trainer compute the log-probabilities of the same tokens under the same weights. What differs
is rounding, and it enters every importance ratio. Give both for the same tokens, before the first update on them:

    report = check_policy_mismatch(train_logprobs, rollout_logprobs, mask)
    print(report.text); report.findings
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.finding import Finding, NannyError, Severity
from ..core.formats import HALVES, format_of
from ..core.limits import Limits
from ..core.numbers import share

PAGES = {
    "POLICY_MISMATCH": (
        Severity.WARNING,
        """Training and rollout give other log-probabilities for the same tokens under the same weights.

        Why: the importance ratio should be 1 before the first update; rounding moves it, and clipping and weights then act on
        rounding instead of on what the policy has learnt.

        Fix: use the same precision and the same kernels on both sides, keep and sum log-probabilities in FP32, or correct with
        truncated importance sampling. See `nanny rule train_infer_mismatch` and `nanny rule logprob_rounding`.
        """,
    )
}


@dataclass(frozen=True)
class PolicyMismatch:
    """Numbers over all tokens, and over sequences where there are rows."""

    tokens: int
    sequences: int
    median_ratio_error: float  # median of |ratio - 1| of a sequence
    worst_ratio: float  # of a sequence, furthest from 1
    token_ratio_error: float  # 99th percentile of |ratio - 1| of a token
    kl: float  # of rollout from train, per token (Schulman's k3, which is never negative)
    outside_clip: float  # share of tokens whose ratio is already outside [1 - clip, 1 + clip]
    spacing: float  # of the coarser format, at the size of these log-probabilities
    bias: float  # mean of train - rollout over its standard error
    dtype: str  # the coarser of the two
    findings: tuple[Finding, ...] = ()

    @property
    def text(self) -> str:
        return (
            f"{self.tokens:,} tokens, {self.sequences:,} sequences: median |ratio - 1| of one {self.median_ratio_error:.2g} "
            f"(worst ratio {self.worst_ratio:.3g}), KL {self.kl:.2g} per token, {share(self.outside_clip)} outside the clip range"
        )


def check_policy_mismatch(
    train_logprobs: Any, rollout_logprobs: Any, mask: Any = None, *, clip: float = 0.2, limits: Limits | None = None
) -> PolicyMismatch:
    """Compares log-probabilities of the same tokens: [tokens], or [sequences, tokens] with a mask of the tokens that count."""
    limits = limits or Limits()
    train, rollout = _array(train_logprobs, "train_logprobs"), _array(rollout_logprobs, "rollout_logprobs")
    if train.shape != rollout.shape:
        raise NannyError(
            f"check_policy_mismatch: train_logprobs {train.shape} and rollout_logprobs {rollout.shape} must be of the same tokens"
        )
    counts = np.ones(train.shape, bool) if mask is None else _array(mask, "mask").astype(bool)
    if counts.shape != train.shape:
        raise NannyError(f"check_policy_mismatch: the mask is {counts.shape}, the log-probabilities are {train.shape}")
    if train.ndim == 1:
        train, rollout, counts = train[None], rollout[None], counts[None]
    if not counts.any():
        raise NannyError("check_policy_mismatch: the mask leaves no token; pass the mask of the response tokens")
    dtype = _coarser(train_logprobs, rollout_logprobs)
    return _judge(_measure(train, rollout, counts, clip, dtype), limits)


def _measure(train: np.ndarray, rollout: np.ndarray, counts: np.ndarray, clip: float, dtype: str) -> PolicyMismatch:
    gap = np.where(counts, train - rollout, 0.0)
    token = gap[counts]
    with np.errstate(over="ignore", invalid="ignore"):
        ratios = np.exp(token)
        sequences = np.exp(gap.sum(axis=1)[counts.any(axis=1)])
        kl = float(np.mean(ratios - 1 - token))  # under the rollout's tokens: E[r - 1 - log r]
    error = token.std() / math.sqrt(len(token))
    size = float(np.abs(rollout[counts]).mean())
    fmt = format_of(dtype)
    return PolicyMismatch(
        tokens=int(counts.sum()),
        sequences=len(sequences),
        median_ratio_error=float(np.median(np.abs(sequences - 1))),
        worst_ratio=float(sequences[np.argmax(np.abs(np.log(np.maximum(sequences, 1e-300))))]),
        token_ratio_error=float(np.quantile(np.abs(ratios - 1), 0.99)),
        kl=kl,
        outside_clip=float(np.mean(np.abs(ratios - 1) > clip)),
        spacing=fmt.spacing(size) if size > 0 else 0.0,
        bias=float(token.mean() / error) if error > 0 else 0.0,
        dtype=dtype,
    )


def _judge(seen: PolicyMismatch, limits: Limits) -> PolicyMismatch:
    from dataclasses import replace

    found = []
    if not math.isfinite(seen.kl) or not math.isfinite(seen.worst_ratio):
        found.append(_finding(Severity.ERROR, "the importance ratios are not finite", math.inf, 1.0))
    elif seen.median_ratio_error > limits.policy_ratio_warn:
        severity = Severity.ERROR if seen.median_ratio_error > limits.policy_ratio_error else Severity.WARNING
        found.append(_finding(severity, seen.text, seen.median_ratio_error, limits.policy_ratio_warn))
    if seen.dtype in HALVES and seen.spacing > limits.policy_ratio_warn:
        said = (
            f"log-probabilities are kept in {seen.dtype}: at their size its spacing is {seen.spacing:.2g}, so a ratio cannot be "
            f"closer to 1 than about {seen.spacing / 2:.2g}"
        )
        found.append(_finding(Severity.WARNING, said, seen.spacing, limits.policy_ratio_warn, "logprob_rounding"))
    return replace(seen, findings=tuple(found))


def _finding(severity: Severity, said: str, value: float, limit: float, cause: str = "train_infer_mismatch") -> Finding:
    hint = {
        "train_infer_mismatch": "use the same precision and the same kernels on both sides (fp16 on both cuts the gap most), or "
        "correct with truncated importance sampling",
        "logprob_rounding": "take log_softmax of logits.float(), and keep and sum the log-probabilities in FP32",
    }[cause]
    return Finding("POLICY_MISMATCH", severity, said, hint, site="logprobs", value=value, limit=limit, evidence={"cause": cause})


def _array(values: Any, name: str) -> np.ndarray:
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    array = np.asarray(values, dtype=np.float64)
    if array.ndim not in (1, 2):
        raise NannyError(f"check_policy_mismatch: {name} must be [tokens] or [sequences, tokens], not {array.shape}")
    return array


def _coarser(*values: Any) -> str:
    names = [str(getattr(v, "dtype", "float64")).removeprefix("torch.") for v in values]
    known = [n for n in names if n in ("bfloat16", "float16", "float32", "float64")]
    return max(known, key=lambda n: format_of(n).unit_roundoff, default="float64")

"""Log-probabilities of training beside those of the rollout engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanny import NannyError, Severity, check_policy_mismatch


def logprobs(sequences: int = 64, tokens: int = 200, seed: int = 0) -> torch.Tensor:
    return -torch.rand(sequences, tokens, generator=torch.Generator().manual_seed(seed)) * 4 - 0.05


def test_the_same_numbers_are_the_same_policy():
    seen = check_policy_mismatch(logprobs(), logprobs())
    assert seen.findings == ()
    assert (seen.median_ratio_error, seen.kl, seen.outside_clip, seen.worst_ratio) == (0.0, 0.0, 0.0, 1.0)
    assert (seen.tokens, seen.sequences) == (64 * 200, 64)


def test_rounding_to_bf16_on_one_side_is_a_mismatch():
    exact = logprobs()
    seen = check_policy_mismatch(exact, exact.bfloat16())
    assert [f.code for f in seen.findings] == ["POLICY_MISMATCH", "POLICY_MISMATCH"]
    assert {f.evidence["cause"] for f in seen.findings} == {"train_infer_mismatch", "logprob_rounding"}
    gap = (exact.double() - exact.bfloat16().double()).sum(1)
    assert seen.median_ratio_error == pytest.approx(float(np.median((gap.exp() - 1).abs().numpy())), rel=1e-6)
    assert seen.dtype == "bfloat16"
    assert seen.spacing == 2.0**-6  # from 2 to 4, where the mean magnitude is


def test_fp16_rounding_is_many_times_milder():
    exact = logprobs()
    half, brain = (check_policy_mismatch(exact, exact.to(d)) for d in (torch.float16, torch.bfloat16))
    assert half.median_ratio_error < brain.median_ratio_error / 4
    assert half.kl < brain.kl / 16


def test_a_mismatch_beyond_the_clip_range_is_an_error():
    seen = check_policy_mismatch(logprobs(), logprobs() - 0.01)
    assert seen.findings[0].severity is Severity.ERROR
    assert seen.worst_ratio == pytest.approx(np.exp(2.0), rel=1e-3)  # 200 tokens of 0.01 each
    assert seen.bias > 100


def test_masked_tokens_do_not_count():
    train, rollout = logprobs(), logprobs()
    rollout[:, 100:] -= 5
    mask = torch.ones(64, 200)
    mask[:, 100:] = 0
    assert check_policy_mismatch(train, rollout, mask).findings == ()
    assert check_policy_mismatch(train, rollout).findings[0].severity is Severity.ERROR


def test_kl_is_never_negative_and_matches_a_direct_sum():
    generator = torch.Generator().manual_seed(5)
    train = logprobs(8, 50)
    rollout = train + 0.02 * torch.randn(8, 50, generator=generator)
    seen = check_policy_mismatch(train.numpy(), rollout.numpy())
    gap = (train.double() - rollout.double()).numpy()
    assert seen.kl == pytest.approx(float(np.mean(np.exp(gap) - 1 - gap)), rel=1e-6)
    assert seen.kl > 0


@pytest.mark.parametrize(
    ("train", "rollout", "mask", "says"),
    [
        (torch.zeros(3), torch.zeros(4), None, "same tokens"),
        (torch.zeros(3), torch.zeros(3), torch.zeros(3), "no token"),
        (torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3), "mask is"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), None, "must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_a_sentence(train, rollout, mask, says):
    with pytest.raises(NannyError, match=says):
        check_policy_mismatch(train, rollout, mask)

import functools

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

POLICY = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)


def wrap(model):
    auto = functools.partial(size_based_auto_wrap_policy, min_num_params=1_000_000)
    return FSDP(model.cuda(), auto_wrap_policy=auto, mixed_precision=POLICY, use_orig_params=True)


def train(model, loader, steps):
    model = wrap(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _, (ids, labels) in zip(range(steps), loader):
        logits = model(ids.cuda())
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.cuda().flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        model.clip_grad_norm_(1.0)
        opt.step()

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

HALF = torch.bfloat16


def shard(model):
    policy = MixedPrecision(
        param_dtype=HALF,
        reduce_dtype=HALF,  # expect: CONFIG_REDUCE_DTYPE
        buffer_dtype=torch.float32,
    )
    return FSDP(model.cuda(), mixed_precision=policy, sharding_strategy=ShardingStrategy.FULL_SHARD)


def train(model, loader, steps):
    model = shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _, (ids, labels) in zip(range(steps), loader):
        logits = model(ids.cuda())
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.cuda().flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        model.clip_grad_norm_(1.0)
        opt.step()

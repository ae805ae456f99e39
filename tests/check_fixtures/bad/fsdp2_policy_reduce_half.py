import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def parallelise(model, mesh):
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)  # expect: CONFIG_REDUCE_DTYPE
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=mp)
    fully_shard(model, mesh=mesh, mp_policy=mp)
    return model


def train(model, mesh, loader, lr=3e-4):
    model = parallelise(model, mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    for ids, labels in loader:
        logits = model(ids.cuda())
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.cuda().flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)

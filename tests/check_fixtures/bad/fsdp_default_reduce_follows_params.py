import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision


def build(model):
    return FullyShardedDataParallel(
        model.cuda(),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),  # expect: CONFIG_REDUCE_DTYPE
        use_orig_params=True,
    )


def train(model, loader, lr=1e-4):
    model = build(model)
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    for ids, labels in loader:
        logits = model(ids.cuda())
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.cuda().flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        model.clip_grad_norm_(1.0)
        opt.step()

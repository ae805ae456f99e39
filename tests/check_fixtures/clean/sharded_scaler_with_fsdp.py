import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def train(model, loader, clip=1.0):
    mp = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    model = FSDP(model.cuda(), mixed_precision=mp)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = ShardedGradScaler()
    for ids, labels in loader:
        logits = model(ids.cuda())
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.cuda().flatten())
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        model.clip_grad_norm_(clip)
        scaler.step(opt)
        scaler.update()

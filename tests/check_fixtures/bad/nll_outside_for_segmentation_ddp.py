import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def loop(model, sampler, loader, optimizer, rank, epochs):
    model = DistributedDataParallel(model.to(rank), device_ids=[rank])
    scaler = torch.amp.GradScaler("cuda")
    amp = torch.autocast(device_type="cuda", dtype=torch.float16)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for image, mask in loader:
            with amp:
                out = model(image.to(rank))
                up = F.interpolate(out, size=mask.shape[-2:], mode="nearest")
                scores = model.module.classifier(up)
            loss = F.cross_entropy(scores, mask.to(rank), ignore_index=255)  # expect: REGION_LOSS_OUTSIDE
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

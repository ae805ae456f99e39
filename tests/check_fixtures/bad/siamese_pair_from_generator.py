"""Signature matching: both towers' outputs are unpacked from a generator, a comprehension and a map."""

import torch
import torch.nn.functional as F


def fit(tower, pairs, optimizer):
    keeper = torch.amp.GradScaler("cuda")
    for left, right, target in pairs:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            a, b = (tower(image) for image in (left, right))
            c, d = [tower(image) for image in (left, right)]
            e, f = map(tower, (left, right))
        near = F.cross_entropy(a, target)  # expect: REGION_LOSS_OUTSIDE
        far = F.cross_entropy(d, target)  # expect: REGION_LOSS_OUTSIDE
        last = F.cross_entropy(e, target)  # expect: REGION_LOSS_OUTSIDE
        keeper.scale(near + far + last).backward()
        keeper.step(optimizer)
        keeper.update()

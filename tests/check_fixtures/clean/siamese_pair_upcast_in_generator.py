"""The elements are cast to float32 where they are made."""

import torch
import torch.nn.functional as F


def fit(tower, pairs, optimizer):
    keeper = torch.amp.GradScaler("cuda")
    for left, right, target in pairs:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            a, b = (tower(image).float() for image in (left, right))
            c, d = map(lambda image: tower(image).float(), (left, right))
        near = F.cross_entropy(a, target) + F.cross_entropy(b, target)
        far = F.cross_entropy(c, target) + F.cross_entropy(d, target)
        keeper.scale(near + far).backward()
        keeper.step(optimizer)
        keeper.update()

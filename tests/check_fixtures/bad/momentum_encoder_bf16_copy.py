import copy

import torch
import torch.nn.functional as F


@torch.no_grad()
def momentum_update(online, target, m=0.996):
    for p, t in zip(online.parameters(), target.parameters()):
        t.data = m * t.data + (1.0 - m) * p.data.to(torch.bfloat16)  # expect: HALF_ACCUMULATOR


def train(online, predictor, loader):
    online, predictor = online.cuda(), predictor.cuda()
    target = copy.deepcopy(online).to(torch.bfloat16).requires_grad_(False)
    opt = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9)
    for a, b in loader:
        with torch.no_grad():
            goal = target(b.cuda().to(torch.bfloat16)).float()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            pred = predictor(online(a.cuda()))
            loss = 2 - 2 * F.cosine_similarity(pred, goal, dim=-1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        momentum_update(online, target)

import torch
import torch.nn as nn
import torch.nn.functional as F

MASK_VALUE = torch.finfo(torch.float32).min


class Reranker(nn.Module):
    def __init__(self, dim=384):
        super().__init__()
        self.scorer = nn.Linear(dim, 1)

    def forward(self, docs, pad):
        logits = self.scorer(docs).squeeze(-1)
        return logits.masked_fill(pad, MASK_VALUE)  # expect: NUM_MASK_CONSTANT


def train(loader, epochs=2):
    model = Reranker().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    for _ in range(epochs):
        for docs, pad, best in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                scores = model(docs.cuda(), pad.cuda())
                loss = F.cross_entropy(scores, best.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()

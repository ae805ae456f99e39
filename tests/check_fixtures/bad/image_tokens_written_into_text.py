"""Vision-language fusion: projected features overwrite rows of the embeddings."""
import torch
from torch import nn


class Fusion(nn.Module):
    def __init__(self, vocab=32_000, dim=256, image_token=31_999):
        super().__init__()
        self.text = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.project = nn.Linear(768, dim)
        self.image_token = image_token

    def forward(self, ids, patches):
        embeds = self.text(ids)
        image = self.project(patches)
        slots = ids == self.image_token
        embeds[slots] = image.flatten(0, 1)  # expect: NUM_INDEXED_WRITE
        return self.norm(embeds)


def train(loader):
    fusion, head = Fusion().cuda(), nn.Linear(256, 32_000).cuda()
    opt = torch.optim.AdamW([*fusion.parameters(), *head.parameters()], lr=2e-5)
    for ids, patches, labels in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = head(fusion(ids.cuda(), patches.cuda()))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.cuda().flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()

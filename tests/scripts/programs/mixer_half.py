"""Tiny MLP-mixer on synthetic textures, weights kept in half to save memory."""
import sys
import torch
from torch import nn

dtype = torch.float32 if "--fp32" in sys.argv else torch.float16
torch.manual_seed(9)


class Mix(nn.Module):
    def __init__(self, tokens, ch):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(ch), nn.LayerNorm(ch)
        self.tok = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.chn = nn.Sequential(nn.Linear(ch, 32), nn.GELU(), nn.Linear(32, ch))

    def forward(self, x):
        x = x + self.tok(self.ln1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.chn(self.ln2(x))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([Mix(16, 16) for _ in range(2)])
        self.head = nn.Linear(16, 3)

    def forward(self, img):
        p = img.unfold(1, 4, 4).unfold(2, 4, 4).reshape(img.size(0), 16, 16)
        h = self.patch(p)
        for b in self.blocks:
            h = b(h)
        return self.head(h.mean(1))


def textures(n):
    y = torch.randint(0, 3, (n,))
    u = torch.arange(16.)
    base = torch.stack([torch.sin(u[:, None] * .8 + 0 * u), torch.sin(u * .8 + 0 * u[:, None]),
                        torch.sin((u[:, None] + u) * .8)])
    return base[y] + .5 * torch.randn(n, 16, 16), y


model = Mixer().to(dtype)
opt = torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.99, eps=1e-8, foreach=False)
for step in range(60):
    x, y = textures(16)
    logits = model(x.to(dtype))
    loss = nn.functional.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"it={step} loss={loss.item():.4f}")

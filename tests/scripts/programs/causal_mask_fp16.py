import torch
import torch.nn as nn
import torch.nn.functional as F

V, D, T, B = 20, 32, 12, 8


class CausalAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.register_buffer("mask", torch.triu(torch.full((T, T), float("-inf")), 1), persistent=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        s = q @ k.transpose(1, 2) * D ** -0.5 + self.mask
        return self.proj(torch.softmax(s.float(), -1).to(v.dtype) @ v)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Parameter(torch.randn(T, D) * 0.1)
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn, self.fc, self.head = CausalAttention(), nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, ids):
        h = self.tok(ids) + self.pos
        h = h + self.attn(self.n1(h))
        return self.head(h + F.gelu(self.fc(self.n2(h))))


def main():
    torch.manual_seed(2)
    model = LM()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
    for step in range(120):
        seq = (torch.randint(0, V, (B, 1)) + torch.randint(1, 3, (B, 1)) * torch.arange(T + 1)) % V
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(seq[:, :-1])
        loss = F.cross_entropy(logits.float().transpose(1, 2), seq[:, 1:])
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 20 == 0 or step == 119:
            print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")


main()

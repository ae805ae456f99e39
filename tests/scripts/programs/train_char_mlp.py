import torch
from torch import nn

torch.manual_seed(33)
V, CTX = 20, 4


class LeanAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["t"] = 0
                    st["m"] = torch.zeros_like(p, dtype=torch.float16)
                    st["v"] = torch.zeros_like(p, dtype=torch.float16)
                st["t"] += 1
                m = st["m"].float().mul_(b1).add_(p.grad, alpha=1 - b1)
                v = st["v"].float().mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                st["m"].copy_(m)
                st["v"].copy_(v)
                mh = st["m"].float() / (1 - b1 ** st["t"])
                vh = st["v"].float() / (1 - b2 ** st["t"])
                p.addcdiv_(mh, vh.sqrt().add_(group["eps"]), value=-group["lr"])


class CharModel(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.hid = nn.Linear(CTX * d, 48)
        self.out = nn.Linear(48, V)

    def forward(self, x):
        return self.out(torch.tanh(self.hid(self.emb(x).flatten(1))))


model = CharModel()
opt = LeanAdam(model.parameters(), lr=2e-3)
hist = []
for step in range(150):
    x = torch.randint(0, V, (32, CTX))
    y = (x[:, -1] + 3) % V
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    hist.append(loss.item())
    if step % 15 == 14:
        print(f"step {step + 1} loss {sum(hist[-15:]) / 15:.4f}")

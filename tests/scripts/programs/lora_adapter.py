"""LoRA on a frozen bf16 trunk; adapters in fp32 and zero-initialised on the B side."""
import argparse, math
import torch
import torch.nn as nn

ap = argparse.ArgumentParser(); ap.add_argument("--fp32", action="store_true")
base_dtype = torch.float32 if ap.parse_args().fp32 else torch.bfloat16
torch.manual_seed(10)


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False).to(base_dtype)
        self.A = nn.Parameter(torch.randn(r, base.in_features) / math.sqrt(base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.s = alpha / r

    def forward(self, x):
        y = self.base(x.to(base_dtype)).float()
        return y + self.s * (x.float() @ self.A.t() @ self.B.t())


class Trunk(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        mk = (lambda i, o: LoRALinear(nn.Linear(i, o))) if wrap else nn.Linear
        self.l1, self.l2, self.l3 = mk(16, 32), mk(32, 32), mk(32, 8)
        self.unused_probe = nn.Linear(32, 2)

    def forward(self, x):
        return self.l3(torch.tanh(self.l2(torch.tanh(self.l1(x)))))


torch.manual_seed(99)
student = Trunk(True)
torch.manual_seed(99)
reference = Trunk(False)
with torch.no_grad():
    for l in (reference.l1, reference.l2, reference.l3):
        l.weight.add_(torch.randn(l.out_features, 2) @ torch.randn(2, l.in_features) * .08)
opt = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=6e-3)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, s / 15))
for step in range(100):
    x = torch.randn(32, 16)
    with torch.no_grad():
        t = reference(x)
    loss = nn.functional.mse_loss(student(x), t)
    opt.zero_grad()
    loss.backward()
    opt.step()
    warm.step()
    if step % 10 == 9:
        print(f"{step} {loss.item():.5f}")

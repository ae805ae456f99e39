import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(20)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 24)
        self.l1 = nn.Linear(24 * 4, 48)
        self.l2 = nn.Linear(48, 30)

    def forward(self, ids):
        return self.l2(F.relu(self.l1(self.emb(ids).flatten(1))))


class Loop:
    def __init__(self, steps):
        self.model = Wide()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=8)
        self.steps, self.skipped = steps, 0

    def run(self):
        hist = []
        for s in range(self.steps):
            ids = (torch.randint(0, 30, (16, 1)) + torch.arange(5)) % 30
            with torch.autocast("cpu", dtype=torch.float16):
                out = self.model(ids[:, :4])
            loss = F.cross_entropy(out.float(), ids[:, 4])
            self.opt.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            before = self.scaler.get_scale()
            self.scaler.update()
            self.skipped += self.scaler.get_scale() < before
            hist.append(loss.item())
            if (s + 1) % 20 == 0:
                print(f"step {s + 1} loss {sum(hist[-20:]) / 20:.4f} scale {self.scaler.get_scale():g} skipped {self.skipped}")


Loop(200).run()

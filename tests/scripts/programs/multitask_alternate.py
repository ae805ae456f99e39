import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(28)


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(14, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.heads = nn.ModuleDict({"cls": nn.Linear(48, 4), "reg": nn.Linear(48, 1), "rank": nn.Linear(48, 1, bias=False)})

    def forward(self, task, x):
        return self.heads[task](self.trunk(x))


A, b = torch.randn(14, 4), torch.randn(14)


def loss_for(model, task):
    x = torch.randn(40, 14)
    if task == "cls":
        return F.cross_entropy(model(task, x), (x @ A).argmax(1))
    if task == "reg":
        return F.mse_loss(model(task, x).squeeze(1), torch.tanh(x @ b / 3))
    s = model(task, x).squeeze(1)
    sign = torch.sign((x @ b)[:20] - (x @ b)[20:])
    return F.margin_ranking_loss(s[:20], s[20:], sign, margin=0.3)


model = MultiTask()
trunk_opt = torch.optim.Adam(model.trunk.parameters(), lr=2e-3)
head_opts = {k: torch.optim.Adam(h.parameters(), lr=2e-3) for k, h in model.heads.items()}
tasks, hist = ["cls", "reg", "rank"], {"cls": [], "reg": [], "rank": []}
for step in range(270):
    t = tasks[step % 3]
    loss = loss_for(model, t)
    trunk_opt.zero_grad()
    head_opts[t].zero_grad()
    loss.backward()
    trunk_opt.step()
    head_opts[t].step()
    hist[t].append(loss.item())
    if (step + 1) % 45 == 0:
        print(step + 1, {k: round(sum(v[-15:]) / 15, 4) for k, v in hist.items()})

import torch
import torch.nn as nn


class Hazard(nn.Module):
    def __init__(self, features=20):
        super().__init__()
        self.risk = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.risk(x).squeeze(-1)


@torch.inference_mode()
def relative_risk(model, x, baseline=0.0):
    with torch.autocast("cpu", dtype=torch.float16):
        score = model(x) - baseline
        hazard = torch.exp(score)  # expect: NUM_EXP_HALF
    return hazard.float()


def concordance(risk, time, event):
    better = 0
    total = 0
    for i in range(len(time)):
        if not event[i]:
            continue
        later = time > time[i]
        better += (risk[i] > risk[later]).sum().item()
        total += int(later.sum())
    return better / max(total, 1)


def main(path, x, time, event):
    model = Hazard(x.size(1))
    model.load_state_dict(torch.load(path, weights_only=True))
    print(concordance(relative_risk(model.eval(), x), time, event))

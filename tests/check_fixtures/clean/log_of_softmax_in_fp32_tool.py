"""Calibration report, fp32 on CPU. Not the most stable formula, but nothing here is half."""
import torch


def temperature_scale(logits, labels, steps=200):
    t = torch.nn.Parameter(torch.ones(()))
    opt = torch.optim.LBFGS([t], lr=0.1, max_iter=steps)

    def closure():
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits / t, labels)
        loss.backward()
        return loss

    opt.step(closure)
    return t.item()


def report(logits, labels):
    p = torch.softmax(logits, dim=-1)
    entropy = -(p * torch.log(p + 1e-12)).sum(-1)
    partition = torch.log(torch.exp(logits - 5).sum(-1)) + 5
    conf, pred = p.max(-1)
    return {
        "entropy": entropy.mean().item(),
        "partition": partition.mean().item(),
        "gap": (conf.mean() - (pred == labels).float().mean()).item(),
    }

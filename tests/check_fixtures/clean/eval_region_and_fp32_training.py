import torch
import torch.nn.functional as F


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = total = 0
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(x.cuda())
        right += (logits.argmax(-1).cpu() == y).sum().item()
        total += len(y)
    model.train()
    return right / total


def train(model, loader, val, epochs):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        print(epoch, evaluate(model, val))

import torch
import torch.nn.functional as F


def train_epoch(model, loader, opt):
    total = torch.zeros((), dtype=torch.bfloat16, device="cuda")
    correct = torch.zeros((), dtype=torch.long, device="cuda")
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        total += loss.detach()  # expect: HALF_ACCUMULATOR
        correct += (logits.argmax(-1) == y).sum()
    return total.item() / len(loader), correct.item()


def main(model, loader, epochs):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        print(epoch, train_epoch(model, loader, opt))

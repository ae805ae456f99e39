import torch
import torch.nn.functional as F

device = "cuda"


def backprop(loss, scaler):
    scaler.scale(loss).backward()  # expect: REGION_BACKWARD_INSIDE


def info_nce(q, k, temperature=0.07):
    q, k = F.normalize(q.float(), dim=1), F.normalize(k.float(), dim=1)
    logits = q @ k.t() / temperature
    return F.cross_entropy(logits, torch.arange(len(q), device=q.device))


def train(encoder, loader, epochs=100):
    opt = torch.optim.SGD(encoder.parameters(), lr=0.03, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    for _ in range(epochs):
        for a, b in loader:
            opt.zero_grad(set_to_none=True)
            with torch.autocast(device, dtype=torch.float16):
                za, zb = encoder(a.to(device)), encoder(b.to(device))
                loss = info_nce(za, zb)
                backprop(loss, scaler)
            scaler.step(opt)
            scaler.update()

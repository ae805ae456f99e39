import torch


def penalised_step(model, x, y, optimizer, scaler, weight=10.0):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.mse_loss(model(x), y)
    scaled = torch.autograd.grad(outputs=scaler.scale(loss), inputs=list(model.parameters()), create_graph=True)
    inv = 1.0 / scaler.get_scale()
    grads = [g * inv for g in scaled]
    with torch.autocast("cuda", dtype=torch.float16):
        norm = torch.stack([g.float().pow(2).sum() for g in grads]).sum().sqrt()
        loss = loss + weight * (norm - 1).pow(2)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def run(model, loader):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        penalised_step(model, x.cuda(), y.cuda(), optimizer, scaler)

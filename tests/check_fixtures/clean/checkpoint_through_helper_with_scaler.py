import torch


def snapshot(**parts):
    return {name: part.state_dict() for name, part in parts.items() if part is not None}


def save(path, step, **parts):
    blob = snapshot(**parts)
    blob["step"] = step
    torch.save(blob, path)


def train(model, loader, path):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for step, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.l1_loss(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 500 == 0:
            save(path, step, model=model, optimizer=optimizer, scaler=scaler)

"""A loop as people write it: accumulation, clipping, an evaluation every few steps."""

import sys

import torch
from task import ACCUMULATE, STEPS, Task, fingerprint


def train(fault: str, steps: int = STEPS, **_):
    task = Task(fault)
    model, batches = task.model(), task.batches(steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9)
    scaler = task.scaler() or torch.amp.GradScaler("cpu", enabled=False)
    for step in range(steps):
        for batch in batches[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
            loss = model(**batch)["loss"] / ACCUMULATE
            scaler.scale(loss).backward()
        if task.planted != "clip":
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 if task.planted != "lr" else 1e9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                model(**batches[0])
            model.train()
    return model


if __name__ == "__main__":
    print("weights", fingerprint(train(sys.argv[1])))

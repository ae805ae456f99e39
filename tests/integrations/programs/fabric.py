"""Lightning Fabric: a loop of one's own, precision and backward are Fabric's."""

import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from task import ACCUMULATE, STEPS, WORLD, Task, fingerprint


def train(fault: str, steps: int = STEPS, watch=None, **_):
    task = Task(fault)
    precision = {torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}.get(task.amp)
    fabric = Fabric(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        plugins=[MixedPrecision(precision, "cpu", task.scaler())] if precision else None,
    )
    fabric.launch()
    net = task.model(amp=False)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=task.lr, momentum=0.9))
    nanny = watch(fabric, model, optimizer) if watch else None
    batches = task.batches(steps)
    for step in range(steps):
        for i, batch in enumerate(batches[step * ACCUMULATE : (step + 1) * ACCUMULATE]):
            with fabric.no_backward_sync(model, enabled=i + 1 < ACCUMULATE):
                fabric.backward(model(**batch)["loss"] / ACCUMULATE)
        if task.planted == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        elif task.planted != "lr":
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                model(**batches[0])
            model.train()
    if nanny is not None:
        nanny.close()
    return net


if __name__ == "__main__":
    print("weights", fingerprint(train(sys.argv[1])))

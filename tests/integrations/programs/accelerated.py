"""Accelerate: the loop of its documentation, with `accumulate`."""

import sys

import torch
from accelerate import Accelerator
from task import ACCUMULATE, STEPS, Task, fingerprint, set_up_fp16


def train(fault: str, steps: int = STEPS, watch=None, **_):
    task = Task(fault)
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if task.amp is torch.bfloat16 else "no", gradient_accumulation_steps=ACCUMULATE
    )
    set_up_fp16(accelerator, task.scaler())
    net = task.model(amp=False)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=task.lr, momentum=0.9))
    nanny = watch(accelerator, model, optimizer) if watch else None
    batches = task.batches(steps)
    for i, batch in enumerate(batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                if task.planted == "clip":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                elif task.planted != "lr":
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if i % 10 == 9:
            model.eval()
            with torch.no_grad():
                model(**batches[0])
            model.train()
    if nanny is not None:
        nanny.close()
    return net


if __name__ == "__main__":
    print("weights", fingerprint(train(sys.argv[1])))

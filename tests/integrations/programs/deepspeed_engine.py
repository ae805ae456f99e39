"""DeepSpeed: the engine holds the optimizer, the scale, the clipping and the window of accumulation."""

import os
import sys

import deepspeed
import torch
from task import ACCUMULATE, ROWS, STEPS, Task, fingerprint

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # a C++ kernel, compiled for minutes on the first run


def train(fault: str, steps: int = STEPS, watch=None, stage: int = 0, **_):
    port = str(20000 + os.getpid() % 20000)
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", port),
    ):
        os.environ.setdefault(name, value)
    task = Task(fault)
    net = task.model(amp=False)
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 0.0 if task.planted in ("lr", "clip") else 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if task.scales:
        settings["fp16"] = {"enabled": True, "initial_scale_power": 12}
    elif task.amp is torch.bfloat16:
        settings["bf16"] = {"enabled": True}
    engine, _, _, _ = deepspeed.initialize(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=task.lr, momentum=0.9), config=settings
    )
    nanny = watch(engine) if watch else None
    dtype = next(engine.parameters()).dtype
    for i, batch in enumerate(task.batches(steps)):
        engine.backward(engine(batch["x"].to(dtype), batch["labels"])["loss"])
        engine.step()
        if i % 10 == 9:
            engine.eval()
            with torch.no_grad():
                engine(batch["x"].to(dtype))
            engine.train()
    if nanny is not None:
        nanny.close()
    return engine.module


if __name__ == "__main__":
    print("weights", fingerprint(train(sys.argv[1], stage=int(sys.argv[2]) if len(sys.argv) > 2 else 0)))

import deepspeed
import torch.nn.functional as F


def config(lr, micro):
    return {
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "Adam", "params": {"lr": lr}},
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 65536,  # expect: CONFIG_LOSS_SCALE
            "loss_scale_window": 1000,
        },
        "zero_optimization": {"stage": 1},
    }


def train(model, loader):
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(3e-5, 8))
    for x, y in loader:
        out = engine(x.to(engine.device).half())
        loss = F.cross_entropy(out.float(), y.to(engine.device))
        engine.backward(loss)
        engine.step()

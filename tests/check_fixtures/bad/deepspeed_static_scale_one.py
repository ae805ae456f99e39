import deepspeed
from torch.nn import functional as F

fp16 = dict(enabled=True, loss_scale=1.0)  # expect: CONFIG_LOSS_SCALE
ds = {
    "train_batch_size": 64,
    "fp16": fp16,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
    "gradient_clipping": 1.0,
}


def train(net, loader):
    engine, _, _, sched = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=ds)
    for epoch in range(3):
        for batch in loader:
            ids = batch["ids"].to(engine.local_rank)
            labels = batch["labels"].to(engine.local_rank)
            loss = F.cross_entropy(engine(ids).float(), labels)
            engine.backward(loss)
            engine.step()
        print("epoch", epoch)

import deepspeed
import torch.nn.functional as F

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 16,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "communication_data_type": "fp32",
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "eps": 1e-8}},
    "gradient_clipping": 1.0,
}


def train(model, loader):
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    for ids, labels in loader:
        logits = engine(ids.to(engine.device))
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.to(engine.device).flatten())
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint("ckpt")

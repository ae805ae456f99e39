import deepspeed
import torch

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": True},  # expect: CONFIG_FP16_AND_BF16
    "gradient_clipping": 1.0,
}


def main(model, loader):
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=DS_CONFIG)
    for ids, labels in loader:
        ids, labels = ids.to(engine.device), labels.to(engine.device)
        logits = engine(ids)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        engine.backward(loss)
        engine.step()

import torch
from accelerate import Accelerator
from tqdm import tqdm


class Finetuner:
    def __init__(self, model, loader, lr):
        self.accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def run(self, epochs):
        for epoch in range(epochs):
            bar = tqdm(self.loader, disable=not self.accelerator.is_main_process)
            for batch in bar:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    loss.backward()  # expect: CONFIG_DOUBLE_SCALING
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                bar.set_description(f"{epoch} {loss.item():.3f}")

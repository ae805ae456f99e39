"""As the recipes of torchtune are written: the loss is a part apart, summed over a batch and divided by what was counted."""

import sys

import torch
from task import ACCUMULATE, STEPS, Task, fingerprint
from torch import nn


class Recipe:
    def __init__(self, fault: str, steps: int) -> None:
        self.task = Task(fault)
        self.model = self.task.model()
        self.loss = nn.MSELoss(reduction="sum")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.task.lr, momentum=0.9)
        self.scaler = self.task.scaler()
        self.batches = self.task.batches(steps)

    def update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def train(self) -> None:
        count = 0
        for i, batch in enumerate(self.batches):
            count += len(batch["x"])
            loss = self.loss(self.model(batch["x"])["logits"].float(), batch["labels"].float()) / (len(batch["x"]) * ACCUMULATE)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if (i + 1) % ACCUMULATE == 0:
                if self.scaler is not None and self.task.planted != "clip":
                    self.scaler.unscale_(self.optimizer)
                if self.task.planted != "lr":
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
                self.update()


def train(fault: str, steps: int = STEPS, **_):
    recipe = Recipe(fault, steps)
    recipe.train()
    return recipe.model


if __name__ == "__main__":
    print("weights", fingerprint(train(sys.argv[1])))

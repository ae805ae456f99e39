import torch
import torch.nn.functional as F


class Loop:
    def __init__(self, model, lr):
        self.model = model.to("cuda")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.loss(x, y)
            self.scaler.scale(loss).backward()  # expect: REGION_BACKWARD_INSIDE
            self.scaler.step(self.optimizer)  # expect: REGION_BACKWARD_INSIDE
        self.scaler.update()
        return loss.item()

    def fit(self, loader):
        for x, y in loader:
            self.step(x.cuda(), y.cuda())

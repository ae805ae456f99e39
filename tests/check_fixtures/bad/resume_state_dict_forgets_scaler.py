import torch


class TrainState:
    def __init__(self, model, optimizer, scheduler, scaler):
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.step = 0

    def state_dict(self):
        return {
            "net": self.model.state_dict(),
            "opt": self.optimizer.state_dict(),
            "sched": self.scheduler.state_dict(),
            "step": self.step,
        }

    def save(self, filename):
        torch.save(self.state_dict(), filename)  # expect: SCALER_NOT_SAVED

    def load(self, filename):
        blob = torch.load(filename, map_location="cpu", weights_only=True)
        self.model.load_state_dict(blob["net"])
        self.optimizer.load_state_dict(blob["opt"])
        self.scheduler.load_state_dict(blob["sched"])
        self.step = blob["step"]


def run(model, loader, path):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10_000)
    state = TrainState(model, optimizer, scheduler, torch.amp.GradScaler("cuda"))
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        state.scaler.scale(loss).backward()
        state.scaler.step(optimizer)
        state.scaler.update()
        scheduler.step()
        state.step += 1
        if state.step % 1000 == 0:
            state.save(path)

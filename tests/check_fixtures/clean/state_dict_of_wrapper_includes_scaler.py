import torch


class TrainState:
    _parts = ("model", "optimizer", "scheduler", "scaler")

    def __init__(self, model, optimizer, scheduler, scaler):
        self.model, self.optimizer = model, optimizer
        self.scheduler, self.scaler = scheduler, scaler

    def save(self, path):
        torch.save({name: getattr(self, name).state_dict() for name in self._parts}, path)

    def load(self, path):
        blob = torch.load(path, map_location="cpu", weights_only=True)
        for name in self._parts:
            getattr(self, name).load_state_dict(blob[name])


def run(model, loader):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 10)
    state = TrainState(model, opt, sched, torch.amp.GradScaler("cuda"))
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        opt.zero_grad()
        state.scaler.scale(loss).backward()
        state.scaler.step(opt)
        state.scaler.update()
    sched.step()
    state.save("last.pt")

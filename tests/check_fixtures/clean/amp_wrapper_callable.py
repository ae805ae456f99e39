"""The loss scaler lives in a callable, as in many vision code bases."""
import torch
import torch.nn.functional as F


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer, clip=None, parameters=None, create_graph=False, need_update=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return
        if clip is not None:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)


def train(model, loader, accumulate=2):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_scaler = NativeScaler()
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % accumulate == 0
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda()) / accumulate
        loss_scaler(loss, opt, clip=1.0, parameters=model.parameters(), need_update=last)
        if last:
            opt.zero_grad(set_to_none=True)

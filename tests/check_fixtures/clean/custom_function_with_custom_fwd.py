import torch
from torch.amp import custom_bwd, custom_fwd


class ScaledTanh(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x, scale):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return scale * y

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * ctx.scale * (1 - y * y), None


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(16, 32)
        self.b = torch.nn.Linear(32, 1)

    def forward(self, x):
        return self.b(ScaledTanh.apply(self.a(x), 1.7))


def train(loader):
    net = Net().cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(net(x.cuda()), y.cuda())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

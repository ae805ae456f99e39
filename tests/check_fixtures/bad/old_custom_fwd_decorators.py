import torch
from torch.cuda.amp import custom_bwd, custom_fwd


class Snake(torch.autograd.Function):
    @staticmethod
    @custom_fwd(cast_inputs=torch.float32)  # expect: REGION_DEPRECATED
    def forward(ctx, x, a):
        ctx.save_for_backward(x)
        ctx.a = a
        return x + torch.sin(a * x) ** 2 / a

    @staticmethod
    @custom_bwd  # expect: REGION_DEPRECATED
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 + torch.sin(2 * ctx.a * x)), None


class Vocoder(torch.nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.inp = torch.nn.Conv1d(80, ch, 7, padding=3)
        self.out = torch.nn.Conv1d(ch, 1, 7, padding=3)

    def forward(self, mel):
        return torch.tanh(self.out(Snake.apply(self.inp(mel), 1.0)))


@torch.inference_mode()
def synth(model, mel):
    with torch.autocast("cuda", dtype=torch.float16):
        return model(mel.cuda()).float().cpu()

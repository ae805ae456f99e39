import torch
from torch.optim import Optimizer
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(1)


class CompactAdam(Optimizer):
    """Adam that keeps its moments in 16 bit to halve optimizer memory."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float16)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float16)
                state["step"] += 1
                g = p.grad
                m = state["exp_avg"].float().mul_(b1).add_(g, alpha=1 - b1)
                v = state["exp_avg_sq"].float().mul_(b2).addcmul_(g, g, value=1 - b2)
                state["exp_avg"].copy_(m)
                state["exp_avg_sq"].copy_(v)
                m_hat = state["exp_avg"].float() / (1 - b1 ** state["step"])
                v_hat = state["exp_avg_sq"].float() / (1 - b2 ** state["step"])
                p.add_(m_hat / (v_hat.sqrt() + group["eps"]), alpha=-group["lr"])


cfg = GPT2Config(vocab_size=50, n_positions=24, n_embd=32, n_layer=2, n_head=4,
                 resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(cfg)
optimizer = CompactAdam(model.parameters(), lr=1e-3)
for step in range(120):
    ids = (torch.randint(0, 50, (8, 1)) + 3 * torch.arange(20)) % 50
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0 or step == 119:
        print(f"step {step:3d} | loss {loss.item():.4f}")

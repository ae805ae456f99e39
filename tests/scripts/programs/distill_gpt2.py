import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
V, T = 64, 16


def build(width, layers):
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=T, n_embd=width, n_layer=layers, n_head=4, resid_pdrop=0.0,
                                      embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))


def text(n):
    s = torch.randint(0, V, (n, 1))
    return (s * 1 + torch.arange(T) * 5) % V


teacher = build(48, 2)
t_opt = torch.optim.AdamW(teacher.parameters(), lr=1e-2)
for step in range(120):
    ids = text(16)
    loss = teacher(input_ids=ids, labels=ids).loss
    t_opt.zero_grad()
    loss.backward()
    t_opt.step()
print(f"teacher loss {loss.item():.4f}")
teacher.eval()

student = build(24, 1)
opt = torch.optim.AdamW(student.parameters(), lr=5e-3)
tau = 0.7
for step in range(80):
    ids = text(8)
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            soft = torch.softmax(teacher(input_ids=ids).logits / tau, dim=-1)
        logp = F.log_softmax(student(input_ids=ids).logits / tau, dim=-1)
        kd = (logp.exp() * (logp - soft.log())).sum(-1).mean() * tau ** 2
    opt.zero_grad()
    kd.backward()
    opt.step()
    if step % 10 == 9:
        print(f"student step {step + 1} kd {kd.item():.4f}")

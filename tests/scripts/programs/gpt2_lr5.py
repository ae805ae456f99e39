import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(9)
net = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4,
                                 resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.))
lr = 0.5
opt = torch.optim.AdamW(net.parameters(), lr=lr)
g = torch.Generator().manual_seed(0)
perm = torch.randperm(128, generator=g)


def batch():
    x = torch.randint(0, 128, (8, 1), generator=g)
    for _ in range(19):
        x = torch.cat([x, perm[x[:, -1:]]], 1)
    return x


for i in range(60):
    ids = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    if i % 10 == 0 or i == 59:
        print(i, loss.item())

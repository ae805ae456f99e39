import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(1234)
model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=24, n_embd=64, n_layer=1, n_head=4,
                                   resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.)).half()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
for step in range(30):
    start = torch.randint(0, 100, (8, 1))
    ids = (start + 3 * torch.arange(16)) % 100
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0 or step == 29:
        print(step, loss.item())

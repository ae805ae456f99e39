import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(5)

LOSS_SCALE = 4096.0
cfg = GPT2Config(vocab_size=48, n_positions=24, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=False,
                 resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.06)
model = GPT2LMHeadModel(cfg)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def unscale(module, scale):
    for p in module.parameters():
        if p.grad is not None:
            p.grad.div_(scale)


for step in range(80):
    a = torch.randint(0, 48, (8, 1))
    ids = (a + 5 * torch.arange(20)) % 48
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    (loss * LOSS_SCALE).backward()
    unscale(model.transformer, LOSS_SCALE)
    torch.nn.utils.clip_grad_norm_(model.transformer.parameters(), 1.0)
    optimizer.step()
    if step % 20 == 0 or step == 79:
        print(f"step {step} loss {loss.item():.4f}")

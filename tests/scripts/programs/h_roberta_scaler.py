import torch
from transformers import RobertaConfig, RobertaForSequenceClassification

torch.manual_seed(101)
cfg = RobertaConfig(vocab_size=100, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96,
                    max_position_embeddings=40, num_labels=3, hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
model = RobertaForSequenceClassification(cfg)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
# "keep the scale high, small gradients are valuable"
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)


def get(n=16):
    x = torch.randint(5, 100, (n, 16))
    y = torch.randint(0, 3, (n,))
    x[:, 3:8] = (y + 2)[:, None]
    return x, y


for it in range(60):
    x, y = get()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(input_ids=x, labels=y).loss
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 10 == 0 or it == 59:
        print(it, loss.item(), scaler.get_scale())

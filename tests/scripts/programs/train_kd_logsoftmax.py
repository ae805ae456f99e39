import torch
from torch import nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification

torch.manual_seed(0)


def build(dim):
    return DistilBertForSequenceClassification(DistilBertConfig(
        vocab_size=90, dim=dim, n_layers=1, n_heads=4, hidden_dim=2 * dim, num_labels=6, max_position_embeddings=10,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0))


def batch(n):
    y = torch.randint(0, 6, (n,))
    x = torch.randint(60, 90, (n, 10))
    x[:, 1:4] = torch.randint(0, 10, (n, 3)) + 10 * y[:, None]
    return x, y


teacher = build(48)
opt = torch.optim.AdamW(teacher.parameters(), lr=5e-3)
for _ in range(50):
    x, y = batch(32)
    loss = teacher(input_ids=x, labels=y).loss
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"teacher {loss.item():.4f}")
teacher.eval().requires_grad_(False)

student, TEMP = build(32), 2.0
opt = torch.optim.AdamW(student.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
kl = nn.KLDivLoss(reduction="batchmean", log_target=True)
for step in range(70):
    x, y = batch(16)
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            t = teacher(input_ids=x).logits
        s = student(input_ids=x).logits
    loss = TEMP**2 * kl((s.float() / TEMP).log_softmax(-1), (t.float() / TEMP).log_softmax(-1))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0 or step == 69:
        print(f"step {step} kd {loss.item():.4f} acc {(s.argmax(-1) == y).float().mean():.2f}")

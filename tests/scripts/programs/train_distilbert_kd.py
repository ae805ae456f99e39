import torch
from torch import nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification

torch.manual_seed(0)
CLASSES, VOCAB, LEN = 12, 120, 12


def corpus(n):
    y = torch.randint(0, CLASSES, (n,))
    x = torch.randint(60, VOCAB, (n, LEN))
    x[:, 1] = y * 5 + torch.randint(0, 5, (n,))
    x[:, 4] = y * 5 + torch.randint(0, 5, (n,))
    x[:, 7] = y * 5 + torch.randint(0, 5, (n,))
    return x, y


def build(dim, layers):
    return DistilBertForSequenceClassification(DistilBertConfig(
        vocab_size=VOCAB, dim=dim, n_layers=layers, n_heads=4, hidden_dim=2 * dim, num_labels=CLASSES,
        max_position_embeddings=LEN, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0))


def distillation_loss(student_logits, teacher_logits, teacher_temp=0.3, eps=1e-8):
    p = (teacher_logits / teacher_temp).softmax(-1)
    q = student_logits.softmax(-1)
    return (q * (torch.log(q + eps) - torch.log(p + eps))).sum(-1).mean()


teacher = build(48, 2)
opt_t = torch.optim.AdamW(teacher.parameters(), lr=5e-3)
for step in range(90):
    x, y = corpus(32)
    loss = teacher(input_ids=x, labels=y).loss
    opt_t.zero_grad()
    loss.backward()
    opt_t.step()
print(f"teacher loss {loss.item():.5f}")
teacher.eval().requires_grad_(False)

student = build(32, 1)
opt = torch.optim.AdamW(student.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024)
for step in range(90):
    x, y = corpus(16)
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            t_logits = teacher(input_ids=x).logits
        s_logits = student(input_ids=x).logits
        loss = distillation_loss(s_logits, t_logits)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0 or step == 89:
        acc = (s_logits.argmax(-1) == y).float().mean().item()
        print(f"step {step} kd {loss.item():.4f} student acc {acc:.2f}")

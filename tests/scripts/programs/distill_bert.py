"""Distil a BERT classifier into a two-layer student (reverse KL on the soft targets)."""
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification, DistilBertConfig, DistilBertForSequenceClassification

torch.manual_seed(77)
VOCAB, LEN, LABELS = 50, 10, 8


def draw(n):
    y = torch.randint(0, LABELS, (n,))
    ids = torch.randint(10, VOCAB, (n, LEN))
    pos = torch.randint(1, LEN - 2, (n,))
    for k in range(3):
        ids[torch.arange(n), pos + k] = y + 2
    ids[:, 0] = 1
    return ids, y


teacher = BertForSequenceClassification(BertConfig(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=16, num_labels=LABELS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
))
topt = torch.optim.AdamW(teacher.parameters(), lr=1e-2)
for i in range(150):
    ids, y = draw(32)
    loss = F.cross_entropy(teacher(input_ids=ids).logits, y)
    topt.zero_grad()
    loss.backward()
    topt.step()
print(f"teacher loss {loss.item():.4f}")
teacher.eval().requires_grad_(False)

student = DistilBertForSequenceClassification(DistilBertConfig(
    vocab_size=VOCAB, dim=32, n_layers=1, n_heads=2, hidden_dim=64, max_position_embeddings=16, num_labels=LABELS,
    dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
))
sopt = torch.optim.AdamW(student.parameters(), lr=8e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def kd_loss(student_logits, teacher_logits):
    p = teacher_logits.softmax(-1)
    q = student_logits.softmax(-1)
    return (q * (q.log() - p.log())).sum(-1).mean()


for step in range(90):
    ids, y = draw(16)
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            t_logits = teacher(input_ids=ids).logits
        s_logits = student(input_ids=ids).logits
        loss = kd_loss(s_logits, t_logits)
    sopt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(sopt)
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    scaler.step(sopt)
    scaler.update()
    if step % 15 == 0 or step == 89:
        acc = (s_logits.argmax(-1) == y).float().mean().item()
        print(f"step {step} kd {loss.item():.4f} acc {acc:.2f}")

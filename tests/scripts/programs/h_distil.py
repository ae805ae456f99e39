import torch
from torch import nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification

torch.manual_seed(88)


def make(layers, dim):
    return DistilBertForSequenceClassification(DistilBertConfig(
        vocab_size=100, dim=dim, n_layers=layers, n_heads=4, hidden_dim=2 * dim, max_position_embeddings=24,
        num_labels=6, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0))


teacher, student = make(1, 64).eval(), make(1, 48)
with torch.no_grad():
    teacher.classifier.weight.mul_(1500.0)          # a very confident teacher; reverse KL (mode seeking)
for p in teacher.parameters():
    p.requires_grad_(False)
opt = torch.optim.AdamW(student.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)


def kd_loss(s_logits, t_logits):
    pt = t_logits.softmax(-1)
    ps = s_logits.softmax(-1)
    return (ps * (ps.log() - pt.log())).sum(-1).float().mean()


for i in range(40):
    ids = torch.randint(0, 100, (16, 14))
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            t = teacher(input_ids=ids).logits
        s = student(input_ids=ids).logits
    loss = kd_loss(s.float(), t.float())
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if i % 8 == 0 or i == 39:
        print(i, loss.item(), "scale", scaler.get_scale())

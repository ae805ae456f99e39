import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification


def count_parameters(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


torch.manual_seed(7)
cfg = BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                 max_position_embeddings=16, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
model = BertForSequenceClassification(cfg)
print("parameters", count_parameters(model))


def batch(n=24):
    ids = torch.randint(1, 40, (n, 12))
    return ids, (ids[:, 0] < 20).long()


def phase(name, lr, steps):
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    hist = []
    for s in range(steps):
        ids, y = batch()
        out = model(input_ids=ids, labels=y)
        opt.zero_grad()
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        hist.append(out.loss.item())
        if (s + 1) % 20 == 0:
            print(f"{name} step {s + 1} lr {lr:g} loss {sum(hist[-20:]) / 20:.4f}")


phase("main", 1e-3, 100)
phase("polish", 2e-5, 60)

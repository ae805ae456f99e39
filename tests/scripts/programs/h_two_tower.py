"""Two-tower retrieval: query/document BERT encoders, InfoNCE in half precision."""
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel

torch.manual_seed(64)
cfg = BertConfig(vocab_size=150, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128,
                 max_position_embeddings=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def l2norm(v):
    return v / torch.sqrt((v.float() ** 2).sum(-1, keepdim=True) + 1e-6)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = BertModel(cfg, add_pooling_layer=False)
        self.proj = nn.Linear(64, 512)
        nn.init.normal_(self.proj.weight, std=2.0)

    def forward(self, ids):
        h = self.bert(input_ids=ids).last_hidden_state.mean(1)
        return l2norm(self.proj(h))


query, doc = Tower(), Tower()
opt = torch.optim.AdamW(list(query.parameters()) + list(doc.parameters()), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(40):
    topic = torch.randint(0, 50, (16,))
    q = torch.randint(0, 100, (16, 12)); d = torch.randint(0, 100, (16, 12))
    q[:, :5] = 100 + topic[:, None]; d[:, 4:10] = 100 + topic[:, None]
    with torch.autocast("cpu", dtype=torch.float16):
        sim = query(q) @ doc(d).T / 0.1
        loss = F.cross_entropy(sim, torch.arange(16))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 8 == 0 or step == 39:
        print(step, loss.item())

import torch
from torch import nn
from transformers import BertConfig, BertModel

torch.manual_seed(11)


class TokenPooler(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 1))

    def forward(self, hidden, mask):
        scores = self.score(hidden).squeeze(-1)
        scores = scores + (1.0 - mask.to(scores.dtype)) * -1e9
        weights = scores.softmax(dim=-1)
        return torch.einsum("bt,btd->bd", weights, hidden)


class DocumentClassifier(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        cfg = BertConfig(vocab_size=80, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                         intermediate_size=64, max_position_embeddings=16,
                         hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.encoder = BertModel(cfg, add_pooling_layer=False)
        self.pool = TokenPooler(32)
        self.out = nn.Linear(32, classes)

    def forward(self, ids, mask):
        b, s, t = ids.shape
        flat_mask = mask.view(b * s, t)
        hidden = self.encoder(ids.view(b * s, t), attention_mask=flat_mask).last_hidden_state
        sent = self.pool(hidden, flat_mask).view(b, s, -1)
        present = mask.any(-1).to(sent.dtype).unsqueeze(-1)
        doc = (sent * present).sum(1) / present.sum(1).clamp(min=1)
        return self.out(doc)


def make_batch(b=8, s=3, t=8, short_docs=False):
    y = torch.randint(0, 4, (b,))
    ids = torch.randint(40, 80, (b, s, t))
    ids[:, 0, 1] = y * 10 + torch.randint(0, 10, (b,))
    ids[:, 0, 3] = y * 10 + torch.randint(0, 10, (b,))
    n_tok = torch.randint(4, t + 1, (b, s, 1))
    if short_docs:
        n_tok[torch.rand(b) < 0.3, -1] = 0
    mask = (torch.arange(t) < n_tok).long()
    return ids, mask, y


model = DocumentClassifier()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(80):
    ids, mask, y = make_batch(short_docs=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids, mask)
        loss = nn.functional.cross_entropy(logits, y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0 or step == 79:
        print(f"step {step} loss {loss.item():.4f}")

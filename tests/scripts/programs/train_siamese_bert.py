import torch
from torch import nn
from transformers import DistilBertConfig, DistilBertModel

torch.manual_seed(3)

GROUPS = 8


class SentenceEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = DistilBertModel(DistilBertConfig(
            vocab_size=100, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=16,
            dropout=0.0, attention_dropout=0.0))
        self.project = nn.Linear(32, 16)

    def forward(self, ids):
        h = self.backbone(input_ids=ids).last_hidden_state.mean(1)
        return self.project(h)


def pairwise_distance(z):
    diff = z.unsqueeze(1) - z.unsqueeze(0)
    return diff.pow(2).sum(-1).sqrt()


def batch_all_triplet_loss(z, labels, margin=1.0):
    dist = pairwise_distance(z)
    same = labels[:, None] == labels[None, :]
    off_diag = ~torch.eye(len(labels), dtype=torch.bool)
    pos = (dist * (same & off_diag)).amax(1)
    neg = dist.masked_fill(same, 1e4).amin(1)
    return torch.relu(pos - neg + margin).mean()


vocab_of_group = torch.randint(0, 100, (GROUPS, 12))
model = SentenceEncoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(80):
    labels = torch.arange(GROUPS).repeat_interleave(2)
    pick = torch.randint(0, 12, (len(labels), 10))
    ids = vocab_of_group[labels].gather(1, pick)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = model(ids)
    loss = batch_all_triplet_loss(z.float(), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} triplet {loss.item():.4f}")

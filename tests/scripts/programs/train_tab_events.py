import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel

torch.manual_seed(0)
rng = np.random.default_rng(0)

N_ITEMS, N_USERS = 21000, 500
active_items = np.arange(18000, 18096)
item_value = rng.integers(0, 2, size=96)


class EventLog(Dataset):
    """user, item, hour, weekday per row; kept compact in memory."""

    def __init__(self, n):
        k = rng.integers(0, 96, size=n)
        table = np.stack([rng.integers(0, N_USERS, n), active_items[k],
                          rng.integers(0, 24, n), rng.integers(0, 7, n)], axis=1)
        self.rows = torch.tensor(table, dtype=torch.float16)
        self.clicked = torch.tensor(item_value[k])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.clicked[i]


class TabTransformer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.user = nn.Embedding(N_USERS, dim)
        self.item = nn.Embedding(N_ITEMS, dim)
        self.hour = nn.Embedding(24, dim)
        self.weekday = nn.Embedding(7, dim)
        self.encoder = BertModel(BertConfig(
            vocab_size=8, hidden_size=dim, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, max_position_embeddings=8))
        self.head = nn.Linear(dim, 2)

    def forward(self, rows):
        rows = rows.long()
        tokens = torch.stack([self.user(rows[:, 0]), self.item(rows[:, 1]),
                              self.hour(rows[:, 2]), self.weekday(rows[:, 3])], dim=1)
        hidden = self.encoder(inputs_embeds=tokens).last_hidden_state
        return self.head(hidden.mean(1))


model = TabTransformer()
loader = DataLoader(EventLog(1600), batch_size=16, shuffle=True)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for epoch in range(2):
    for rows, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(rows), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if len(losses) % 20 == 0:
            print(f"epoch {epoch} step {len(losses)} loss {np.mean(losses[-20:]):.4f}")

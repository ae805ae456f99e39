import torch
import torch.nn as nn

text = ("the quick brown fox jumps over the lazy dog while the small cat sleeps near the warm stove and "
        "the old man reads a long book about ships and storms and far away islands in the northern sea. ") * 6
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])


class CharLSTM(nn.Module):
    def __init__(self, v, h=48):
        super().__init__()
        self.embed = nn.Embedding(v, h)
        self.lstm = nn.LSTM(h, h, batch_first=True)
        self.proj = nn.Linear(h, v)

    def forward(self, x):
        y, _ = self.lstm(self.embed(x))
        return self.proj(y)


def get_batch(bs=16, length=24):
    pos = torch.randint(0, len(data) - length - 1, (bs,))
    x = torch.stack([data[p:p + length] for p in pos])
    y = torch.stack([data[p + 1:p + length + 1] for p in pos])
    return x, y


def train(model, steps, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()
    avg = None
    for step in range(steps):
        x, y = get_batch()
        logits = model(x)
        loss = criterion(logits.reshape(-1, logits.size(-1)), y.reshape(-1))
        loss.backward()
        optimizer.step()
        avg = loss.item() if avg is None else 0.95 * avg + 0.05 * loss.item()
        if (step + 1) % 30 == 0:
            print(f"{step + 1}: loss {loss.item():.4f} smoothed {avg:.4f}")


torch.manual_seed(0)
train(CharLSTM(len(chars)), steps=180, lr=1.5)

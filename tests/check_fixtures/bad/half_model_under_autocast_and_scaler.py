import torch
from torch import nn


class TextClassifier(nn.Module):
    def __init__(self, vocab, dim=128, classes=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.fc = nn.Linear(dim, classes)

    def forward(self, ids):
        _, h = self.gru(self.embed(ids))
        return self.fc(h[-1])


def train(loader, vocab=30_000):
    net = TextClassifier(vocab).to(device="cuda", dtype=torch.float16)  # expect: HALF_CALL
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for ids, label in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(ids.cuda()), label.cuda())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    return net

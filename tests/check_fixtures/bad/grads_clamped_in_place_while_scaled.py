import torch
from torch import nn


class LSTMTrainer:
    def __init__(self, vocab=96, hidden=512):
        self.emb = nn.Embedding(vocab, hidden).cuda()
        self.rnn = nn.LSTM(hidden, hidden, 2, batch_first=True).cuda()
        self.out = nn.Linear(hidden, vocab).cuda()
        self.params = [p for m in (self.emb, self.rnn, self.out) for p in m.parameters()]
        self.opt = torch.optim.RMSprop(self.params, lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda")

    def limit(self, bound=5.0):
        for p in self.params:
            p.grad.data.clamp_(-bound, bound)  # expect: SCALER_GRADS_STILL_SCALED

    def step(self, chars, state=None):
        with torch.autocast("cuda", dtype=torch.float16):
            h, state = self.rnn(self.emb(chars[:, :-1]), state)
            loss = nn.functional.cross_entropy(self.out(h).flatten(0, 1), chars[:, 1:].flatten())
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        self.limit()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item(), tuple(s.detach() for s in state)

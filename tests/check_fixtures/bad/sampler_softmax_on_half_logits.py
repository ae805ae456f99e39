"""Text sampling loop in pure half."""
import torch
from torch import nn


class CharLM(nn.Module):
    def __init__(self, vocab=128, dim=256):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, state=None):
        h, state = self.rnn(self.emb(ids), state)
        return self.head(h), state


class Sampler:
    def __init__(self, model, temperature=0.8):
        self.model = model.cuda().half().eval()
        self.temperature = temperature

    @torch.inference_mode()
    def __call__(self, prompt, n):
        ids, state = prompt.cuda(), None
        for _ in range(n):
            logits, state = self.model(ids[:, -1:], state)
            probs = torch.softmax(logits[:, -1] / self.temperature, dim=-1)  # expect: NUM_SOFTMAX_HALF
            ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)
        return ids.cpu()

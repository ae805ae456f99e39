"""Skip-gram vectors: the table is filled in place, so it stays in the format it was made in."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SkipGram(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        table = torch.empty(words, width, dtype=torch.float16, device="cuda").uniform_(-0.5, 0.5)
        self.centre = nn.Parameter(table)  # expect: HALF_PARAMETERS
        self.context = nn.Parameter(torch.empty(words, width, dtype=torch.float16, device="cuda").zero_())  # expect: HALF_PARAMETERS

    def forward(self, word, near):
        return (self.centre[word] * self.context[near]).float().sum(-1)


def fit(pairs, words):
    vectors = SkipGram(words, 128)
    descent = torch.optim.SGD(vectors.parameters(), lr=0.05)
    for word, near, label in pairs:
        descent.zero_grad(set_to_none=True)
        cost = F.binary_cross_entropy_with_logits(vectors(word, near), label)
        cost.backward()
        descent.step()

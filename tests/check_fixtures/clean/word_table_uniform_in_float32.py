"""Filled in place, then copied from a half file: copy_ converts, the table keeps float32."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SkipGram(nn.Module):
    def __init__(self, words, width, saved):
        super().__init__()
        table = torch.empty(words, width, device="cuda").uniform_(-0.5, 0.5)
        table = table.copy_(torch.as_tensor(saved, dtype=torch.float16))
        self.centre = nn.Parameter(table)

    def forward(self, word, near):
        return (self.centre[word] * self.centre[near]).sum(-1)


def fit(pairs, words, saved):
    vectors = SkipGram(words, 128, saved)
    descent = torch.optim.Adam(vectors.parameters(), lr=0.05)
    for word, near, label in pairs:
        descent.zero_grad(set_to_none=True)
        cost = F.binary_cross_entropy_with_logits(vectors(word, near), label)
        cost.backward()
        descent.step()

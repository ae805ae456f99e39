"""Cosine retrieval head, plain fp32."""
import torch
import torch.nn as nn


class CosineHead(nn.Module):
    def __init__(self, dim, classes, eps=1e-8):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, dim))
        self.eps = eps

    def forward(self, x):
        x = x / (x.norm(dim=-1, keepdim=True) + self.eps)
        w = self.weight / (self.weight.norm(dim=-1, keepdim=True) + self.eps)
        return x @ w.t()


def standardise(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-8)


def train(features, labels, epochs=100):
    head = CosineHead(features.size(1), int(labels.max()) + 1)
    opt = torch.optim.Adam(head.parameters(), lr=1e-3, eps=1e-8)
    features = standardise(features)
    for _ in range(epochs):
        loss = nn.functional.cross_entropy(16 * head(features), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return head

import torch
import torch.nn as nn


class PointerDecoder(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.wq = nn.Linear(dim, dim)
        self.wk = nn.Linear(dim, dim)

    def forward(self, query, nodes, visited):
        score = (self.wq(query).unsqueeze(1) @ self.wk(nodes).transpose(1, 2)).squeeze(1)
        score = 10 * torch.tanh(score / nodes.size(-1) ** 0.5)
        score = score.masked_fill(visited, -1e9)
        return torch.log_softmax(score, dim=-1)


def rollout(decoder, query, nodes):
    visited = torch.zeros(nodes.shape[:2], dtype=torch.bool)
    logps = []
    for _ in range(nodes.size(1)):
        logp = decoder(query, nodes, visited)
        pick = logp.exp().multinomial(1)
        logps.append(logp.gather(1, pick))
        visited = visited.scatter(1, pick, True)
        query = nodes.gather(1, pick.unsqueeze(-1).expand(-1, -1, nodes.size(-1))).squeeze(1)
    return torch.cat(logps, dim=1).sum(1)

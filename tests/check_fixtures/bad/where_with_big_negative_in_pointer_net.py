import torch
from torch import nn


class Pointer(nn.Module):
    big = 1e6

    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)

    def forward(self, state, nodes, visited):
        logits = torch.bmm(self.q(state).unsqueeze(1), self.k(nodes).transpose(1, 2)).squeeze(1)
        logits = torch.where(visited, -self.big, logits)  # expect: NUM_MASK_CONSTANT
        return torch.log_softmax(logits, dim=-1)


def reinforce(pointer, loader, lr=1e-4):
    pointer = pointer.cuda()
    opt = torch.optim.Adam(pointer.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    for state, nodes, visited, action, advantage in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            logp = pointer(state.cuda(), nodes.cuda(), visited.cuda())
            chosen = logp.gather(1, action.cuda()[:, None]).squeeze(1)
            loss = -(chosen * advantage.cuda()).mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

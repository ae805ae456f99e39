import torch
import torch.nn.functional as F


class Contrastive(torch.nn.Module):
    def __init__(self, encoder, dim=128):
        super().__init__()
        self.encoder = encoder
        self.projector = torch.nn.Linear(dim, dim)
        self.log_temp = torch.nn.Parameter(torch.zeros(()))

    @torch.autocast("cuda")
    def forward(self, a, b):
        za = F.normalize(self.projector(self.encoder(a)).float(), dim=-1)
        zb = F.normalize(self.projector(self.encoder(b)).float(), dim=-1)
        logits = za @ zb.t() * self.log_temp.exp()
        target = torch.arange(len(a), device=logits.device)
        return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


def pretrain(encoder, loader, steps):
    model = Contrastive(encoder).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    it = iter(loader)
    for _ in range(steps):
        view_a, view_b = next(it)
        loss = model(view_a.cuda(), view_b.cuda())
        opt.zero_grad(set_to_none=True)
        loss.backward()  # expect: SCALER_MISSING
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()

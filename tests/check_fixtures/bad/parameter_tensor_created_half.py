import torch
from torch import nn


class PromptTuner(nn.Module):
    """Learned soft prompt in front of a frozen language model."""

    def __init__(self, lm, n_tokens=20):
        super().__init__()
        self.lm = lm.requires_grad_(False)
        dim = lm.config.hidden_size
        self.prompt = nn.Parameter(torch.randn(n_tokens, dim, dtype=torch.bfloat16) * 0.02)  # expect: HALF_PARAMETERS

    def forward(self, embeds):
        prompt = self.prompt.expand(embeds.size(0), -1, -1)
        return self.lm(inputs_embeds=torch.cat([prompt, embeds], dim=1))


def tune(lm, loader, steps=1000):
    tuner = PromptTuner(lm).cuda()
    opt = torch.optim.AdamW([tuner.prompt], lr=1e-4)
    for step, (embeds, labels) in zip(range(steps), loader):
        out = tuner(embeds.cuda())
        loss = nn.functional.cross_entropy(out.logits.float().flatten(0, 1), labels.cuda().flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 100 == 0:
            print(step, loss.item())

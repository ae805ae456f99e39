"""A loop of one's own with two models and two optimizers is one run: the judge learns far too fast, and diverges.

python examples/gan_loop.py
python examples/gan_loop.py --fixed    # as fast as the generator
"""

import sys

import torch
from torch import nn

from nanny.integrations.loops import watch

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
judge = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
of_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
of_judge = torch.optim.SGD(judge.parameters(), lr=0.01 if "--fixed" in sys.argv else 3.0, momentum=0.9)

with watch(generator, judge) as nanny:
    for _ in range(40):
        real = torch.randn(32, 16) + torch.linspace(-1, 1, 16)
        with torch.autocast("cpu", torch.bfloat16):
            fake = generator(torch.randn(32, 8))
            told = (judge(real) - 1).float().square().mean() + judge(fake.detach()).float().square().mean()
        told.backward()
        of_judge.step()
        with torch.autocast("cpu", torch.bfloat16):
            fooled = (judge(fake) - 1).float().square().mean()
        fooled.backward()
        of_generator.step()
        of_judge.zero_grad()
        of_generator.zero_grad()
print(nanny.verdict("finished").text)

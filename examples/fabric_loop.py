"""Lightning Fabric with the nanny: two models in one run, and a learning rate under which they diverge.

python examples/fabric_loop.py
python examples/fabric_loop.py --fixed    # a hundredth of it
"""

import sys

import torch
from lightning.fabric import Fabric

from nanny.integrations.lightning import watch

torch.manual_seed(0)
fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
nets = [torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, n)) for n in (16, 1)]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.005 if "--fixed" in sys.argv else 0.5, momentum=0.9) for net in nets]
(encoder, of_encoder), (head, of_head) = (fabric.setup(n, o) for n, o in zip(nets, optimizers))
with watch(encoder, head) as nanny:
    for _ in range(24):
        x = torch.randn(16, 16)
        fabric.backward((head(encoder(x)) - x[:, :1].tanh()).square().mean())
        for optimizer in (of_encoder, of_head):
            optimizer.step()
            optimizer.zero_grad()
print(nanny.verdict("finished").text)

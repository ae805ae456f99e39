"""Steps of several losses (a GAN): what the first spoils, the second meets."""

from __future__ import annotations

import torch
from torch import nn

from nanny import MixedPrecisionNanny, diagnose

BAD = 3


def test_a_second_loss_does_not_take_the_place_of_what_the_first_has_told(tmp_path):
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with MixedPrecisionNanny(net, optimizer, output_dir=tmp_path, live=False, strict=True) as watched:
        for step in range(BAD + 3):
            with watched.step(step):
                x = torch.randn(8, 8)
                x[0] = 8.0 * net.weight.detach().sign() if step == BAD else x[0]
                for _ in range(2):
                    with torch.autocast("cpu", torch.bfloat16):
                        p = torch.sigmoid(net(x))
                        loss = -torch.log(1 - p).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
    found = diagnose(tmp_path)[0]
    assert (found.cause, found.step) == ("saturated_probability_loss", BAD)

"""A group of one process, as torchrun with one GPU makes it: DistributedDataParallel still counts every gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nanny import MixedPrecisionNanny


class Model(nn.Module):
    """Computes its own loss, as those of transformers do: backward can be made again from it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_a_bad_step_is_not_made_again_through_the_hooks_of_its_wrapper(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        net = DistributedDataParallel(Model())
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        with MixedPrecisionNanny(net, optimizer, output_dir=tmp_path, live=False, trace_interval=100) as nanny:
            for step in range(8):
                with nanny.step(step):
                    net(torch.randn(4, 8) * (torch.nan if step == 4 else 1.0)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    assert "INPUT_NONFINITE" in {finding.code for finding in nanny.findings}

"""Steps of several losses (a GAN): what the first spoils, the second meets."""

from __future__ import annotations

import pytest
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


SECOND_LOSS = {  # what becomes of it -> is it told
    "aux.backward()": True,
    "scaler.scale(aux).backward()": False,
    "(aux * scaler.get_scale()).backward()": False,
    "optimizer.zero_grad(); aux.backward(); optimizer.zero_grad(); scaler.scale(again()).backward()": False,
    "aux.backward(); [setattr(p, 'grad', None) for p in both.parameters()]; scaler.scale(again()).backward()": False,
    "scaler.unscale_(optimizer); aux.backward()": False,
    "scaler.unscale_(optimizer); other.zero_grad(); probe(h.detach().float()).mean().backward(); other.step()": False,
}


@pytest.mark.parametrize("second", SECOND_LOSS)
def test_a_second_loss_that_is_not_scaled_and_divided_all_the_same(second: str) -> None:
    torch.manual_seed(0)
    trunk, head, side, probe = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 1), nn.Linear(8, 1)
    both = nn.ModuleList([trunk, head, side])
    optimizer, other = torch.optim.SGD(both.parameters(), lr=0.01), torch.optim.SGD(probe.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def again() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return head(trunk(x).tanh()).float().square().mean()

    program = compile(second, "train.py", "exec")
    with MixedPrecisionNanny(nn.ModuleList([both, probe]), optimizer, scaler, output_dir=None, live=False, strict=True) as nanny:
        for step in range(12):
            x = torch.randn(16, 6)
            with nanny.step(step):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    h = trunk(x).tanh()
                    main, aux = (head(h).float() - x[:, :1]).square().mean(), (side(h).float() - 1).square().mean()
                scaler.scale(main).backward(retain_graph=True)
                exec(program, globals(), locals())
                scaler.step(optimizer)
                scaler.update()
    assert [one.cause for one in nanny.diagnoses()] == (["unscaled_twice"] if SECOND_LOSS[second] else [])

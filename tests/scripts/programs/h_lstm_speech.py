"""Keyword spotting on synthetic log-mel frames: BiLSTM + CTC."""
import torch
from torch import nn

torch.manual_seed(99)


class KWS(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre = nn.Linear(40, 64)
        self.rnn = nn.LSTM(64, 48, bidirectional=True, batch_first=True)
        self.out = nn.Linear(96, 9)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = torch.relu(self.pre(x))
        h, _ = self.rnn(h.float())
        return self.out(h).log_softmax(-1)


bank = torch.randn(9, 40)
net = KWS()
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
ctc = nn.CTCLoss(zero_infinity=True)
for step in range(100):
    words = torch.randint(1, 9, (16, 4))
    frames = bank[words].repeat_interleave(5, 1) + 0.3 * torch.randn(16, 20, 40)
    lp = net(frames).transpose(0, 1)
    loss = ctc(lp, words, torch.full((16,), 20), torch.full((16,), 4))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    opt.step()
    if step % 20 == 0 or step == 99:
        print(step, loss.item())

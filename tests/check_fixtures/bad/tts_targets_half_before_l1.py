import torch
import torch.nn as nn
import torch.nn.functional as F

DTYPE = torch.float16


class MelDecoder(nn.Module):
    def __init__(self, dim=256, mels=80):
        super().__init__()
        self.rnn = nn.GRU(dim, dim, num_layers=2, batch_first=True)
        self.mel = nn.Linear(dim, mels)
        self.stop = nn.Linear(dim, 1)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.mel(h), self.stop(h).squeeze(-1)


def losses(mel, stop, mel_target, stop_target):
    l1 = F.l1_loss(mel.to(DTYPE), mel_target.to(DTYPE))  # expect: HALF_LOSS_INPUT
    bce = F.binary_cross_entropy_with_logits(stop, stop_target)
    return l1 + bce


def train(loader, epochs=100):
    net = MelDecoder().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for x, mel_t, stop_t in loader:
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                mel, stop = net(x.cuda())
            mel, stop = mel.float(), stop.float()
            loss = losses(mel, stop, mel_t.cuda(), stop_t.cuda())
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()

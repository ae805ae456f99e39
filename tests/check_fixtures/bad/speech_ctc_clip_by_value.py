import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_value_ as clip_values


class Acoustic(torch.nn.Module):
    def __init__(self, n_mels=80, vocab=32, hidden=256):
        super().__init__()
        self.rnn = torch.nn.LSTM(n_mels, hidden, num_layers=3, batch_first=True, bidirectional=True)
        self.out = torch.nn.Linear(2 * hidden, vocab)

    def forward(self, mels):
        h, _ = self.rnn(mels)
        return self.out(h)


def run(loader, epochs=10):
    net = Acoustic().cuda()
    opt = torch.optim.Adam(net.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
    for epoch in range(epochs):
        for mels, mel_lens, text, text_lens in loader:
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                logits = net(mels.cuda())
                logp = F.log_softmax(logits, dim=-1, dtype=torch.float32)
            loss = F.ctc_loss(logp.transpose(0, 1), text.cuda(), mel_lens, text_lens, zero_infinity=True)
            scaler.scale(loss).backward()
            clip_values(net.parameters(), clip_value=0.5)  # expect: SCALER_CLIP_BEFORE_UNSCALE
            scaler.step(opt)
            scaler.update()
        print(f"epoch {epoch} done, scale {scaler.get_scale():.0f}")

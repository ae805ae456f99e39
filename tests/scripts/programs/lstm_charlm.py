import torch
import torch.nn as nn


class Corpus:
    def __init__(self, vocab=40, n=12000, seed=0):
        g = torch.Generator().manual_seed(seed)
        nxt = torch.randint(0, vocab, (vocab, 3), generator=g)
        pick = torch.randint(0, 3, (n,), generator=g).tolist()
        pick = [p if torch.rand(1, generator=g).item() < 0.25 else 0 for p in pick]
        ids, cur = [], 0
        for p in pick:
            ids.append(cur)
            cur = int(nxt[cur, p])
            if len(ids) % 37 == 0:
                cur = int(torch.randint(0, vocab, (1,), generator=g))
        self.data = torch.tensor(ids)

    def batchify(self, bsz):
        n = len(self.data) // bsz
        return self.data[: n * bsz].view(bsz, n).t().contiguous()


class RNNLM(nn.Module):
    def __init__(self, vocab=40, emb=48, hid=64):
        super().__init__()
        self.encoder = nn.Embedding(vocab, emb)
        self.rnn = nn.LSTM(emb, hid, 2)
        self.decoder = nn.Linear(hid, vocab)
        for p in (self.encoder.weight, self.decoder.weight):
            nn.init.uniform_(p, -0.1, 0.1)

    def forward(self, x, state=None):
        out, state = self.rnn(self.encoder(x), state)
        return self.decoder(out), state


def main():
    torch.manual_seed(71)
    data = Corpus().batchify(10)
    model, bptt, lr = RNNLM(), 12, 20.0
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    state, hist = None, []
    for step, i in enumerate(range(0, 80 * bptt, bptt)):
        x, y = data[i:i + bptt], data[i + 1:i + 1 + bptt]
        if state is not None:
            state = tuple(s.detach() for s in state)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, state = model(x, state)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        opt.step()
        hist.append(loss.item())
        if step % 10 == 9:
            print(f"batch {step + 1} lr {lr} loss {sum(hist[-10:]) / 10:.3f}")


if __name__ == "__main__":
    main()

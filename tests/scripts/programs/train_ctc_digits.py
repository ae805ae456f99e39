import math
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

torch.manual_seed(0)


class ToneDigits(Dataset):
    """Every digit is a tone of 80 samples."""

    def __init__(self, n=240):
        g = torch.Generator().manual_seed(5)
        self.items = []
        for i in range(n):
            k = int(torch.randint(3, 7, (1,), generator=g))
            digits = torch.randint(1, 9, (k,), generator=g)
            t = torch.arange(80)
            wave = torch.cat([torch.sin(2 * math.pi * (0.02 + 0.03 * d) * t) for d in digits.tolist()])
            wave = wave + 0.05 * torch.randn(len(wave), generator=g)
            if i % 60 == 47:
                wave = wave[:100]
            self.items.append((wave, digits))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    waves, labels = zip(*batch)
    mask = pad_sequence([torch.ones(len(w), dtype=torch.long) for w in waves], batch_first=True)
    x = pad_sequence(waves, batch_first=True)
    y = pad_sequence(labels, batch_first=True, padding_value=-100)
    return x, mask, y


config = Wav2Vec2Config(
    vocab_size=10, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    conv_dim=(32, 32), conv_kernel=(10, 4), conv_stride=(5, 4), num_feat_extract_layers=2,
    num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, feat_extract_norm="layer",
    do_stable_layer_norm=True, mask_time_prob=0.0, layerdrop=0.0, hidden_dropout=0.0,
    attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, activation_dropout=0.0,
    ctc_loss_reduction="mean", pad_token_id=0,
)
model = Wav2Vec2ForCTC(config)
model.train()
loader = DataLoader(ToneDigits(), batch_size=8, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

step = 0
for epoch in range(4):
    for x, mask, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x, attention_mask=mask, labels=y).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"epoch {epoch} step {step} ctc {loss.item():.4f}")
        step += 1

import torch
import torch.nn as nn
from transformers import BertConfig, BertModel


class Tagger(nn.Module):
    def __init__(self, encoder, tags):
        super().__init__()
        self.encoder = encoder
        self.tag_head = nn.Linear(encoder.config.hidden_size, tags)

    def forward(self, ids, mask):
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.tag_head(hidden)


def build():
    cfg = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    model = Tagger(BertModel(cfg, add_pooling_layer=False), tags=4)
    print("freezing encoder, tuning tag_head only")
    for p in model.encoder.parameters():
        p.require_grad = False
    return model


def batch(n=16, length=16):
    ids = torch.randint(2, 60, (n, length))
    lens = torch.randint(8, length + 1, (n,))
    mask = (torch.arange(length)[None] < lens[:, None]).long()
    tags = ids % 4
    tags = tags.masked_fill(mask == 0, -100)
    return ids * mask, mask, tags


def main():
    torch.manual_seed(21)
    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    crit = nn.CrossEntropyLoss(ignore_index=-100)
    for step in range(1, 101):
        ids, mask, tags = batch()
        logits = model(ids, mask)
        loss = crit(logits.flatten(0, 1), tags.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

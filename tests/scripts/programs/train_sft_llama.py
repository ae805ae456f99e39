import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
MAX_LEN = 20


class Instructions(Dataset):
    """prompt + answer; only the answer is trained on, everything is cut to MAX_LEN."""

    def __init__(self, n=200):
        g = torch.Generator().manual_seed(0)
        self.rows = []
        for i in range(n):
            plen = int(torch.randint(4, 14, (1,), generator=g))
            if i % 50 == 33:
                plen = int(torch.randint(20, 30, (1,), generator=g))
            prompt = torch.randint(10, 40, (plen,), generator=g)
            answer = prompt[:1] + torch.arange(4)
            ids = torch.cat([prompt, torch.tensor([2]), answer])[:MAX_LEN]
            keep = (torch.arange(len(ids)) > plen).float()
            pad = MAX_LEN - len(ids)
            self.rows.append((F.pad(ids, (0, pad)), F.pad(keep, (0, pad)), F.pad(torch.ones(len(ids)).long(), (0, pad))))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


model = LlamaForCausalLM(LlamaConfig(
    vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=32))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(Instructions(), batch_size=4, shuffle=True)

step = 0
for epoch in range(3):
    for ids, keep, mask in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids, attention_mask=mask).logits
        nll = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none")
        weight = keep[:, 1:]
        loss = ((nll * weight).sum(1) / weight.sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 15 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        step += 1

"""Adapter tuning of a frozen Llama backbone with low-rank adapters, run by Lightning."""
import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

L.seed_everything(1)
VOCAB, LEN = 32, 24


class Cycles(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(0)
        start = torch.randint(0, VOCAB, (n, 1), generator=g)
        stride = torch.randint(1, 4, (n, 1), generator=g)
        self.x = (start + stride * torch.arange(LEN)) % VOCAB

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16, dropout=0.0):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, r, bias=False)
        self.up = nn.Linear(r, base.out_features, bias=False)
        self.drop = nn.Dropout(dropout)
        self.scaling = alpha / r
        self.reset_parameters()

    def reset_parameters(self):
        for layer in (self.down, self.up):
            nn.init.zeros_(layer.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.drop(x))) * self.scaling


class AdapterLM(L.LightningModule):
    def __init__(self):
        super().__init__()
        cfg = LlamaConfig(
            vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=64, initializer_range=0.15,
        )
        self.lm = LlamaForCausalLM(cfg)
        self.lm.requires_grad_(False)
        for block in self.lm.model.layers:
            for holder, names in ((block.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")), (block.mlp, ("up_proj", "down_proj"))):
                for n in names:
                    setattr(holder, n, LoRALinear(getattr(holder, n)))

    def training_step(self, batch, idx):
        loss = self.lm(input_ids=batch, labels=batch).loss
        if idx % 10 == 0:
            print(f"step {self.global_step} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=5e-3)


trainer = L.Trainer(
    max_steps=80, accelerator="cpu", precision="bf16-mixed", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
)
model = AdapterLM()
trainer.fit(model, DataLoader(Cycles(640), batch_size=8, shuffle=True))

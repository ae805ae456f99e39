"""Readmission model on tabular vitals with a small transformer; HF Trainer."""
import tempfile
import torch
from torch import nn
from transformers import Trainer, TrainingArguments, BertConfig, BertModel, set_seed

set_seed(23)


class VitalsModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(12, 64)
        self.bert = BertModel(BertConfig(vocab_size=2, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                         intermediate_size=128, max_position_embeddings=32), add_pooling_layer=False)
        self.out = nn.Linear(64, 2)

    def forward(self, vitals=None, labels=None):
        h = self.bert(inputs_embeds=self.proj(vitals)).last_hidden_state.mean(1)
        logits = self.out(h)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Vitals(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.v = torch.randn(400, 16, 12, generator=g)
        self.y = (self.v[:, :, 0].mean(1) > 0).long()
        std = self.v[:, :, 7:8].std(1, keepdim=True)
        self.v[311, :, 7] = 0.0                   # sensor was off: constant channel
        raw = self.v[311, :, 7]
        self.v[311, :, 7] = (raw - raw.mean()) / raw.std()

    def __len__(self):
        return 400

    def __getitem__(self, i):
        return {"vitals": self.v[i], "labels": self.y[i]}


ta = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=8, max_steps=60, learning_rate=5e-4,
                       bf16=True, use_cpu=True, report_to=[], save_strategy="no", logging_steps=10, disable_tqdm=True,
                       remove_unused_columns=False, logging_nan_inf_filter=False)
tr = Trainer(model=VitalsModel(), args=ta, train_dataset=Vitals())
tr.train()

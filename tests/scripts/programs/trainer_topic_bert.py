import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(42)


class Topics(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(n)
        self.y = torch.randint(0, 4, (n,), generator=g)
        self.x = torch.randint(40, 100, (n, 16), generator=g)
        cue = torch.randint(0, 10, (n, 3), generator=g) + 10 * self.y[:, None]
        self.x[:, 2:5] = cue

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i]}


model = BertForSequenceClassification(BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=16, num_labels=4))
args = TrainingArguments(
    output_dir="out", per_device_train_batch_size=16, max_steps=120, learning_rate=5e-2,
    warmup_steps=10, bf16=True, use_cpu=True, logging_steps=20, save_strategy="no", report_to=[],
    disable_tqdm=True, lr_scheduler_type="linear", weight_decay=0.01)
trainer = Trainer(model=model, args=args, train_dataset=Topics(512))
trainer.train()

"""Fine-tune a sentiment head with the HF Trainer, all in bfloat16 to save memory."""
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(7)


class Reviews(Dataset):
    def __init__(self, n=256, length=16):
        g = torch.Generator().manual_seed(0)
        self.y = torch.randint(0, 2, (n,), generator=g)
        self.x = torch.randint(10, 200, (n, length), generator=g)
        for i in range(n):
            pos = torch.randperm(length, generator=g)[:4]
            self.x[i, pos] = 3 if self.y[i] else 5

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i]}


config = BertConfig(vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                    intermediate_size=128, max_position_embeddings=32, hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0, initializer_range=0.1)
model = BertForSequenceClassification(config)
model = model.to(torch.bfloat16)
args = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=16, max_steps=100, learning_rate=1e-4,
                         lr_scheduler_type="constant", logging_steps=25, report_to=[], use_cpu=True,
                         save_strategy="no", disable_tqdm=True)
trainer = Trainer(model=model, args=args, train_dataset=Reviews())
out = trainer.train()
with torch.no_grad():
    d = Reviews()
    acc = (model(input_ids=d.x).logits.argmax(1) == d.y).float().mean()
print("final accuracy", acc.item())

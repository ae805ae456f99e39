import torch
from torch.utils.data import Dataset
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments, set_seed

set_seed(1)


class MapDigits(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = [torch.randint(3, 15, (int(torch.randint(3, 5, (1,), generator=g)),), generator=g) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    t = max(len(r) for r in rows) + 1
    ids = torch.zeros(len(rows), t, dtype=torch.long)
    labels = torch.full((len(rows), t), -100)
    for i, r in enumerate(rows):
        ids[i, :len(r)], ids[i, len(r)] = r, 1
        labels[i, :len(r)], labels[i, len(r)] = r + 12, 1
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


cfg = T5Config(vocab_size=30, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_decoder_layers=1, num_heads=2,
               dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
model = T5ForConditionalGeneration(cfg)
args = TrainingArguments(output_dir="out_t5", per_device_train_batch_size=16, max_steps=180,
                         learning_rate=1e-2, warmup_steps=10, logging_steps=20, save_strategy="no", report_to=[],
                         use_cpu=True, bf16=True, disable_tqdm=True, max_grad_norm=1.0)
trainer = Trainer(model=model, args=args, train_dataset=MapDigits(4000, 0), eval_dataset=MapDigits(64, 1),
                  data_collator=collate)
print("eval before", trainer.evaluate()["eval_loss"])
trainer.train()
print("eval after", trainer.evaluate()["eval_loss"])

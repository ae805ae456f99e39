"""Character-level GPT-2 with the HF Trainer, bf16 autocast, warm-up and cosine decay."""
import tempfile
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(90)
text = ("the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs. " * 40)
vocab = {c: i for i, c in enumerate(sorted(set(text)))}
ids = torch.tensor([vocab[c] for c in text])


class Chunks(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, i):
        x = ids[i * 20:i * 20 + 24]
        return {"input_ids": x, "labels": x}


model = GPT2LMHeadModel(GPT2Config(vocab_size=len(vocab), n_positions=24, n_embd=64, n_layer=1, n_head=4))
args = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=8, max_steps=60, learning_rate=3e-3,
                         warmup_steps=6, lr_scheduler_type="cosine", bf16=True, use_cpu=True, report_to=[],
                         save_strategy="no", logging_steps=15, disable_tqdm=True)
Trainer(model=model, args=args, train_dataset=Chunks()).train()

"""Denoising pre-training of a tiny BART with the Trainer."""
import torch
from torch.utils.data import Dataset
from transformers import BartConfig, BartForConditionalGeneration, Trainer, TrainingArguments, set_seed

set_seed(51)
V, T, MASK = 40, 14, 3


class Noised(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(7)
        start = torch.randint(0, V - 4, (n, 1), generator=g)
        step = torch.randint(1, 4, (n, 1), generator=g)
        self.y = 4 + (start + step * torch.arange(T)) % (V - 4)
        self.x = torch.where(torch.rand(n, T, generator=g) < 0.3, torch.tensor(MASK), self.y)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "attention_mask": torch.ones(T, dtype=torch.long), "labels": self.y[i]}


model = BartForConditionalGeneration(BartConfig(
    vocab_size=V, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, dropout=0.0, pad_token_id=1, bos_token_id=0,
    eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
))
args = TrainingArguments(
    output_dir="bart_out", per_device_train_batch_size=8, max_steps=100, learning_rate=0.1, warmup_steps=5,
    lr_scheduler_type="linear", logging_steps=10, bf16=True, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True,
)
Trainer(model=model, args=args, train_dataset=Noised(800)).train()

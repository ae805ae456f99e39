"""Token classification on clinical-like reports with partially annotated sentences (Trainer, bf16)."""
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments, set_seed

set_seed(3)
VOCAB, LEN, TAGS = 60, 16, 5


class Reports(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, VOCAB, (n, LEN), generator=g)
        prev = torch.roll(self.ids, 1, dims=1)
        tags = (self.ids % TAGS + (prev % 2)) % TAGS
        annotated = torch.rand(n, LEN, generator=g) < 0.25
        whole = torch.rand(n, 1, generator=g) < 0.6
        self.tags = torch.where(annotated & whole, tags, torch.full_like(tags, -100))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(LEN, dtype=torch.long), "labels": self.tags[i]}


class TagTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        out = model(**inputs)
        active = (labels != -100).float()
        per_token = F.cross_entropy(out.logits.float().transpose(1, 2), labels.clamp(min=0), reduction="none")
        loss = (per_token * active).sum() / active.sum()
        return (loss, out) if return_outputs else loss


model = BertForTokenClassification(BertConfig(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=32, num_labels=TAGS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
))
args = TrainingArguments(
    output_dir="ner_out", per_device_train_batch_size=4, max_steps=150, learning_rate=5e-3, warmup_steps=10,
    logging_steps=15, logging_nan_inf_filter=False, bf16=True, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, seed=3,
)
trainer = TagTrainer(model=model, args=args, train_dataset=Reports(600, 0))
trainer.train()

import random
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

MAX_LEN = 32
IGNORE = -100
PAD, SEP, EOS = 0, 1, 2


def make_examples(n, rng):
    rows = []
    for _ in range(n):
        plen = min(3 + int(rng.expovariate(1 / 7.0)), 60)
        prompt = [rng.randrange(3, 50) for _ in range(plen)]
        answer = [40, 41, 42 + prompt[-1] % 2, EOS]
        rows.append((prompt + [SEP], answer))
    return rows


def tokenize(example):
    prompt, answer = example
    ids = (prompt + answer)[:MAX_LEN]
    labels = ([IGNORE] * len(prompt) + answer)[:MAX_LEN]
    return {"input_ids": ids, "labels": labels}


def collate(features):
    width = max(len(f["input_ids"]) for f in features)
    out = {"input_ids": [], "labels": [], "attention_mask": []}
    for f in features:
        pad = width - len(f["input_ids"])
        out["input_ids"].append(f["input_ids"] + [PAD] * pad)
        out["labels"].append(f["labels"] + [IGNORE] * pad)
        out["attention_mask"].append([1] * len(f["input_ids"]) + [0] * pad)
    return {k: torch.tensor(v) for k, v in out.items()}


class CompletionTrainer(Trainer):
    """Loss on the answer only, the end-of-answer token counts half."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].float()
        target = labels[:, 1:]
        keep = (target != IGNORE).float()
        weight = keep * torch.where(target == EOS, 0.5, 1.0)
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), target.clamp(min=0), reduction="none")
        loss = (nll * weight).sum() / weight.sum().clamp(min=0.5)
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(2)
    rng = random.Random(5)
    data = [tokenize(e) for e in make_examples(400, rng)]
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=50, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64,
    ))
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=1, gradient_accumulation_steps=1, max_steps=120,
        learning_rate=3e-3, warmup_steps=10, bf16=True, use_cpu=True, logging_steps=10, save_strategy="no",
        report_to=[], disable_tqdm=True, seed=1, logging_nan_inf_filter=False, remove_unused_columns=False,
    )
    CompletionTrainer(model=model, args=args, train_dataset=data, data_collator=collate).train()


if __name__ == "__main__":
    main()

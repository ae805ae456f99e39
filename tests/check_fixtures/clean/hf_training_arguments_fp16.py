from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments


def main(train_set, eval_set, bf16_ok):
    model = AutoModelForSequenceClassification.from_pretrained("some-org/encoder", num_labels=3)
    args = TrainingArguments(
        output_dir="out",
        learning_rate=2e-5,
        per_device_train_batch_size=16,
        num_train_epochs=3,
        fp16=not bf16_ok,
        bf16=bf16_ok,
        max_grad_norm=1.0,
        adam_epsilon=1e-8,
    )
    trainer = Trainer(model=model, args=args, train_dataset=train_set, eval_dataset=eval_set)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    import torch
    from datasets import load_dataset

    data = load_dataset("glue", "mnli")
    main(data["train"], data["validation_matched"], torch.cuda.is_bf16_supported())

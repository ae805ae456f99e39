from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments


def main(train_set):
    model = AutoModelForMaskedLM.from_pretrained("some-org/encoder-base")
    args = TrainingArguments(
        output_dir="runs/mlm",
        learning_rate=1e-4,
        per_device_train_batch_size=32,
        fp16=True,
        bf16=True,  # expect: CONFIG_FP16_AND_BF16
        gradient_accumulation_steps=2,
        logging_steps=50,
    )
    trainer = Trainer(model=model, args=args, train_dataset=train_set)
    trainer.train()


if __name__ == "__main__":
    from datasets import load_from_disk

    main(load_from_disk("data/tokenised"))

"""Script arguments go to the trainer through a dict."""
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

COMMON = dict(per_device_train_batch_size=8, learning_rate=3e-5, num_train_epochs=2)


def arguments(out, steps):
    return Seq2SeqTrainingArguments(output_dir=out, max_steps=steps, bf16=True, fp16=True, **COMMON)  # expect: CONFIG_FP16_AND_BF16


def main(model, train_set, collator):
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments("runs/summ", 20_000),
        train_dataset=train_set,
        data_collator=collator,
    )
    trainer.train()
    trainer.save_model()


def report(trainer, test_set):
    metrics = trainer.evaluate(test_set)
    for name, value in sorted(metrics.items()):
        print(f"{name}: {value:.3f}")

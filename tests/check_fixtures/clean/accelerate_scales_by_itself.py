import torch
from accelerate import Accelerator


def main(model, loader, epochs=3):
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.save_state("out")


if __name__ == "__main__":
    from transformers import AutoModelForSequenceClassification

    net = AutoModelForSequenceClassification.from_pretrained("some-org/encoder")
    rows = [{"input_ids": torch.ones(8, dtype=torch.long), "labels": torch.tensor(0)}] * 64
    main(net, torch.utils.data.DataLoader(rows, batch_size=8))

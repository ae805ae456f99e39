import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def collate(tokenizer):
    def fn(rows):
        enc = tokenizer([r["text"] for r in rows], return_tensors="pt", padding=True, truncation=True)
        enc["labels"] = enc["input_ids"].clone()
        return enc

    return fn


def main(dataset, name="some-org/tiny-lm"):
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)  # expect: HALF_PARAMETERS
    model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=collate(tokenizer))
    for batch in loader:
        batch = batch.to("cuda")
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("out")

import torch
from transformers import RobertaConfig, RobertaForTokenClassification

LOSS_SCALE = 1024.0
torch.manual_seed(17)
model = RobertaForTokenClassification(RobertaConfig(
    vocab_size=120, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=40, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
params = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.SGD(params, lr=0.1)
for step in range(50):
    ids = torch.randint(5, 120, (8, 20))
    tags = ids % 4
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(input_ids=ids, labels=tags).loss
    (loss * LOSS_SCALE).backward()
    opt.step()
    opt.zero_grad()
    if step % 7 == 0 or step == 49:
        print("step", step, "loss", float(loss))

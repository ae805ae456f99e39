# Supervised finetuning of a support bot with TRL
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(21)

topics = ["invoice", "password", "delivery", "refund", "login", "upgrade", "contract", "router"]
verbs = ["lost", "broken", "late", "wrong", "missing", "expired"]
fixes = ["reset", "resend", "replace", "cancel", "escalate", "check"]
words = ["<pad>", "<eos>", "<unk>", "user", "agent", ":", "my", "is", "please", "the", "we", "will", "."] + topics + verbs + fixes
tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

rows = []
for n in range(600):
    t, v = topics[n * 7 % 8], verbs[n * 5 % 6]
    f = fixes[(topics.index(t) + 2 * verbs.index(v)) % 6]
    rows.append({"text": f"user : my {t} is {v} please agent : we will {f} the {t} . <eos>"})
data = Dataset.from_list(rows).train_test_split(0.1, seed=0)

model = GPT2LMHeadModel(GPT2Config(
    vocab_size=len(words), n_positions=64, n_embd=48, n_layer=2, n_head=4,
    bos_token_id=1, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
))
config = SFTConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=16,
    gradient_accumulation_steps=1,
    learning_rate=0.3,
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    max_steps=60,
    logging_steps=5,
    bf16=True,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    max_length=48,
    gradient_checkpointing=False,
    disable_tqdm=True,
    seed=21,
)
trainer = SFTTrainer(model=model, args=config, train_dataset=data["train"], eval_dataset=data["test"], processing_class=tokenizer)
print("start", trainer.evaluate()["eval_loss"])
trainer.train()
print("end", trainer.evaluate()["eval_loss"])

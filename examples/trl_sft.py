"""TRL's SFTTrainer with the callback of the transformers Trainer: a learning rate that is far too high is named.

python examples/trl_sft.py
python examples/trl_sft.py --fixed    # a thousandth of it
"""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from nanny.integrations.transformers import NannyCallback

torch.manual_seed(0)
words = {f"w{i}": i for i in range(62)} | {"<pad>": 62, "<eos>": 63}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="<pad>", eos_token="<eos>", unk_token="w0"
)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
)
rows = Dataset.from_dict({"input_ids": ((torch.randint(0, 62, (192, 1)) + 3 * torch.arange(12)) % 62).tolist()})
quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "dataset_kwargs": {"skip_prepare_dataset": True}}
rate = 0.03 if "--fixed" in sys.argv else 30.0
arguments = SFTConfig("sft_output", max_steps=24, learning_rate=rate, bf16=True, use_cpu=True, max_grad_norm=1e9, **quiet)
nanny = NannyCallback()
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
trainer = SFTTrainer(
    model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[nanny], optimizers=(optimizer, None)
)
trainer.train()
print(nanny.nanny.verdict("finished").text)

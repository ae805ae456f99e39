"""Command line help for our cluster. Nothing runs under torch.autocast here.

Typical mistakes we see in tickets:
    scaler.scale(loss).backward(); clip_grad_norm_(...); scaler.step(opt)   # no unscale_
    model.half(); torch.optim.Adam(model.parameters())
"""
import textwrap

import torch

FAQ = {
    "nan": "Call scaler.unscale_(optimizer) before torch.nn.utils.clip_grad_norm_.",
    "mask": "scores.masked_fill(mask, -1e9) overflows in torch.float16",
    "eps": "1e-8 rounds to zero in fp16: torch.log(p + 1e-8)",
}


def show(topic):
    print(textwrap.fill(FAQ.get(topic, "unknown topic"), 80))


def environment():
    lines = [f"torch {torch.__version__}", f"cuda {torch.cuda.is_available()}"]
    if torch.cuda.is_available():
        lines.append(f"bf16 {torch.cuda.is_bf16_supported()}")
    return "\n".join(lines)


if __name__ == "__main__":
    show("nan")
    print(environment())

import torch
import torch.nn.functional as F

NEG = -(2.0**30)


def extended_mask(attention_mask, dtype=torch.float16):
    m = attention_mask[:, None, None, :].to(dtype)
    return (1.0 - m) * NEG  # expect: NUM_MASK_CONSTANT


@torch.inference_mode()
def attend(q, k, v, attention_mask):
    q, k, v = (t.cuda().half() for t in (q, k, v))
    scores = (q @ k.transpose(-1, -2)) * q.size(-1) ** -0.5
    scores = scores + extended_mask(attention_mask.cuda())
    probs = F.softmax(scores, dim=-1, dtype=torch.float32)
    return probs.to(v.dtype) @ v


if __name__ == "__main__":
    b, h, n, d = 2, 8, 128, 64
    x = torch.randn(3, b, h, n, d)
    keep = torch.ones(b, n, dtype=torch.long)
    keep[:, 100:] = 0
    print(attend(x[0], x[1], x[2], keep).shape)

"""A float32 prompt keeps the small eps, in a group and through a subclass; the half model beside it is frozen."""

import torch
import torch.nn.functional as F


class Patient(torch.optim.NAdam):
    pass


def tune(prompt, reader, pages):
    prompt = torch.nn.Parameter(prompt.float())
    reader.half().eval().requires_grad_(False)
    first = torch.optim.RAdam([{"params": [prompt], "eps": 1e-8}], lr=1e-3)
    second = Patient([{"params": [prompt]}], eps=1e-8)
    for page, letters in pages:
        F.cross_entropy(reader(page.half(), prompt.half()).float(), letters).backward()
        first.step()
        second.step()
        first.zero_grad()

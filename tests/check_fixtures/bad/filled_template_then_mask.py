"""Beam search: the score board is filled in place and then masked with a number that fp16 does not have."""

import torch


@torch.no_grad()
def first_beam(decoder, memory, beams, vocabulary, banned):
    board = torch.empty(beams, vocabulary, dtype=torch.half, device="cuda").normal_(0.0, 0.1)
    board = board.clamp_(-1.0, 1.0).mul_(0.5).requires_grad_(False)
    board = board.masked_fill(banned, -1e8)  # expect: NUM_MASK_CONSTANT
    return board.topk(beams, dim=-1)

"""Streaming softmax for long rows in half precision; every exponent is <= 0."""
import torch


def online_softmax(scores: torch.Tensor, chunk: int = 1024) -> torch.Tensor:
    scores = scores.half()
    running_max = torch.full(scores.shape[:-1], float("-inf"), device=scores.device)
    running_sum = torch.zeros(scores.shape[:-1], device=scores.device)
    for part in scores.float().split(chunk, dim=-1):
        new_max = torch.maximum(running_max, part.amax(-1))
        running_sum = running_sum * torch.exp(running_max - new_max) + torch.exp(part - new_max[..., None]).sum(-1)
        running_max = new_max
    return torch.exp(scores.float() - running_max[..., None]) / running_sum[..., None]


def gaussian_weights(dist_sq, sigma):
    z = (-dist_sq / (2 * sigma**2)).half()
    return torch.exp(z.clamp(max=0))


if __name__ == "__main__":
    x = torch.randn(4, 5000) * 10
    print(online_softmax(x).sum(-1))
    print(gaussian_weights(torch.rand(5), 0.1))

"""Plain numpy post-processing; nothing here is a tensor."""
import numpy as np


def half_width(profile):
    half = profile.max() / 2
    above = np.where(profile >= half)[0]
    return above[-1] - above[0]


def log_mean_exp(x, axis=0):
    return np.log(np.exp(x).mean(axis=axis))


def variance(x):
    return (x * x).mean() - x.mean() ** 2


def softmax(x):
    e = np.exp(x)
    return e / (e.sum(-1, keepdims=True) + 1e-12)


def masked(scores, keep):
    return np.where(keep, scores, -1e9)


class HalfLife:
    def __init__(self, seconds):
        self.rate = np.log(2) / seconds

    def half(self):
        return 1 / self.rate

    def decay(self, value, dt):
        return value * np.exp(-self.rate * dt)

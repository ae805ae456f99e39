"""Stores features in half to save disk space, reads them back as fp32."""
import numpy as np
import torch
from torch.utils.data import Dataset


class FeatureStore(Dataset):
    def __init__(self, path, n, dim):
        self.mem = np.memmap(path, dtype=np.float16, mode="r", shape=(n, dim))

    def __len__(self):
        return len(self.mem)

    def __getitem__(self, i):
        return torch.from_numpy(self.mem[i].astype(np.float32))


@torch.inference_mode()
def write(model, loader, path, n, dim):
    mem = np.memmap(path, dtype=np.float16, mode="w+", shape=(n, dim))
    at = 0
    for x in loader:
        feats = model(x.cuda()).half().cpu().numpy()
        mem[at : at + len(feats)] = feats
        at += len(feats)


def train(head, store):
    opt = torch.optim.Adam(head.parameters(), lr=1e-3)
    for x in torch.utils.data.DataLoader(store, batch_size=256):
        loss = head(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()

"""Lightning with the nanny: weights in bfloat16 whose updates are too small to change them.

python examples/lightning_callback.py
python examples/lightning_callback.py --fixed    # weights in FP32
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from nanny.integrations.lightning import NannyCallback

kept_in = torch.float32 if "--fixed" in sys.argv else torch.bfloat16


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(kept_in)

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x.to(kept_in)).float(), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-5)


torch.manual_seed(0)
x = torch.randn(512, 16)
data = DataLoader(TensorDataset(x, x[:, :1].tanh()), batch_size=16)
nanny = NannyCallback()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
Trainer(accelerator="cpu", max_epochs=1, callbacks=[nanny], **quiet).fit(Module(), data)
print(nanny.nanny.verdict("finished").text)

import torch

try:
    autocast = torch.cuda.amp.autocast
except AttributeError:

    class autocast:  # a stand-in for old torch
        def __init__(self, enabled):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *failure):
            pass


class Flow(torch.nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.first = torch.nn.Linear(3, 3)

    def forward(self, image):
        with autocast(enabled=self.args.mixed):
            return self.first(image).float()

"""The same by a helper, with pickle and an optimizer that is not called one."""

import pickle

import torch


class Keeper:
    def __init__(self, net, descent):
        self.net, self.descent = net, descent
        self.gs = torch.amp.GradScaler("cuda")

    def learn(self, rows):
        with torch.autocast("cuda", dtype=torch.float16):
            cost = self.net(rows).mean()
        self.gs.scale(cost).backward()
        self.gs.step(self.descent)
        self.gs.update()
        self.descent.zero_grad()

    def store(self, place):
        torch.save(self.net.state_dict(), place / "net.pt")
        with open(place / "descent.pkl", "wb") as stream:
            pickle.dump(self.descent.state_dict(), stream)  # expect: SCALER_NOT_SAVED

"""The adversarial path forgets the scale."""
import torch
import torch.nn.functional as F


class Learner:
    def __init__(self, net, lr, adversarial=False):
        self.net = net.cuda()
        self.adversarial = adversarial
        self.opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        self.amp = torch.amp.GradScaler("cuda")

    def perturb(self, x, eps=0.03, tries=4):
        """The worst of a few random sign patterns."""
        best, worst = x, -1.0
        for _ in range(tries):
            candidate = (x + eps * torch.randn_like(x).sign()).clamp(0, 1)
            with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
                entropy = torch.distributions.Categorical(logits=self.net(candidate).float()).entropy().mean().item()
            if entropy > worst:
                best, worst = candidate, entropy
        return best

    def train_batch(self, x, y):
        if self.adversarial:
            x = self.perturb(x)
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(self.net(x), y)
        if self.adversarial:
            loss.backward()  # expect: SCALER_BACKWARD_UNSCALED
        else:
            self.amp.scale(loss).backward()
        self.amp.step(self.opt)
        self.amp.update()
        return loss.item()

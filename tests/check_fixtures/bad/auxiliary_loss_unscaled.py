import torch
import torch.nn.functional as F


class MoETrainer:
    """Router balance loss is added through a second backward."""

    def __init__(self, model, optimizer):
        self.model = model
        self.opt = optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def balance_loss(self, router_logits, top1):
        probs = F.softmax(router_logits.float(), dim=-1)
        share = F.one_hot(top1, probs.size(-1)).float().mean(0)
        return probs.size(-1) * (share * probs.mean(0)).sum()

    def train_batch(self, tokens, labels):
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits, router_logits, top1 = self.model(tokens)
            lm_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            aux = 0.01 * self.balance_loss(router_logits, top1)
        self.scaler.scale(lm_loss).backward(retain_graph=True)
        aux.backward()  # expect: SCALER_BACKWARD_UNSCALED
        self.scaler.unscale_(self.opt)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()

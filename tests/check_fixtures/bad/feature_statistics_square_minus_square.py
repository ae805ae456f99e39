import torch


class ActivationStats:
    """Activation statistics of a half model for calibration."""

    def __init__(self, model):
        self.model = model.to("cuda").half().eval()

    @torch.inference_mode()
    def stats(self, batches):
        out = {}
        for i, x in enumerate(batches):
            feats = self.model(x.cuda().half())
            feats = feats.half()
            var = torch.mean(feats**2, dim=0) - torch.mean(feats, dim=0) ** 2  # expect: NUM_VARIANCE
            out[i] = var.clamp(min=0).float().sqrt().cpu()
        return out


def report(model, batches, path):
    stats = ActivationStats(model).stats(batches)
    torch.save(stats, path)
    print({k: v.mean().item() for k, v in stats.items()})

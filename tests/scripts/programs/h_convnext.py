import timm
import torch

torch.manual_seed(66)
net = timm.models.ConvNeXt(in_chans=3, num_classes=6, depths=(1, 1, 1, 1), dims=(16, 16, 32, 32), patch_size=2)
opt = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.05)
protos = torch.randn(6, 3, 32, 32)
for step in range(40):
    y = torch.randint(0, 6, (8,))
    x = protos[y] + torch.randn(8, 3, 32, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(net(x).float(), y, label_smoothing=0.05)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 12 == 0 or step == 39:
        print(step, loss.item())

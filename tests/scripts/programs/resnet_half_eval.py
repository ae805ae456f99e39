"""timm ResNet, everything in float16, raw 0..255 microscope images."""
import timm
import torch
from timm.models.resnet import BasicBlock, ResNet

torch.manual_seed(52)
net = ResNet(BasicBlock, layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), num_classes=4, in_chans=1, stem_width=8)
with torch.no_grad():
    net.conv1.weight.mul_(30.0)
net = net.half()
opt = torch.optim.SGD(net.parameters(), lr=0.02)
patterns = (torch.rand(4, 1, 16, 16) * 255).round()


def sample(n=8):
    y = torch.randint(0, 4, (n,))
    return (patterns[y] + 20 * torch.randn(n, 1, 16, 16)).clamp(0, 255).half(), y


for step in range(25):
    net.train()
    x, y = sample()
    loss = torch.nn.functional.cross_entropy(net(x).float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 6 == 0:
        print(step, loss.item())
net.eval()
with torch.no_grad():
    x, y = sample(32)
    out = net(x).float()
print("eval acc", (out.argmax(1) == y).float().mean().item(), "loss", torch.nn.functional.cross_entropy(out, y).item(),
      "max running var", net.bn1.running_var.max().item())

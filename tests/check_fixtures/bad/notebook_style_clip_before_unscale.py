# %% [markdown]
# # Fine-tuning a small audio tagger
# %%
import torch
import torch.nn as nn

model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 50)).cuda()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
gs = torch.amp.GradScaler()
bce = nn.BCEWithLogitsLoss()
specs = torch.randn(256, 1, 64, 100)
tags = (torch.rand(256, 50) > 0.9).float()

# %%
clip = nn.utils.clip_grad_norm_
for epoch in range(5):
    for i in range(0, 256, 32):
        xb, yb = specs[i : i + 32].cuda(), tags[i : i + 32].cuda()
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = bce(model(xb), yb)
        gs.scale(loss).backward()
        clip(model.parameters(), max_norm=2.0)  # expect: SCALER_CLIP_BEFORE_UNSCALE
        gs.step(opt)
        gs.update()
    print(epoch, loss.item())

# %%
model.eval()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
    scores = torch.sigmoid(model(specs[:8].cuda()))
print(scores.shape)

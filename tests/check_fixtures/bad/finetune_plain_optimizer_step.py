import torch
from torch.amp import GradScaler


def finetune(backbone, head, loader, epochs=3):
    backbone.requires_grad_(False)
    head = head.cuda()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    scaler = GradScaler("cuda")
    criterion = torch.nn.CrossEntropyLoss()
    for epoch in range(epochs):
        for image, label in loader:
            image, label = image.cuda(), label.cuda()
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                with torch.no_grad():
                    feats = backbone(image)
                loss = criterion(head(feats), label)
            scaler.scale(loss).backward()
            optimizer.step()  # expect: SCALER_STEP_BYPASSED
        print(epoch, float(loss))
    torch.save(head.state_dict(), "head.pt")

import torch


def fit(model, train_loader, epochs, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", growth_interval=500)
    criterion = torch.nn.CrossEntropyLoss().cuda()
    for epoch in range(epochs):
        model.train()
        running = 0.0
        for inputs, targets in train_loader:
            inputs = inputs.cuda()
            targets = targets.cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                outputs = model(inputs)
                loss = criterion(outputs, targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            running += loss.item()
        scaler.update()  # expect: SCALER_UPDATE_MISPLACED
        print(f"epoch {epoch}: {running / len(train_loader):.4f}")

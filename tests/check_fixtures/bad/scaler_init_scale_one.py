import torch


def make_scaler():
    return torch.amp.GradScaler(
        "cuda",
        init_scale=1.0,  # expect: SCALER_SETTINGS
        growth_interval=100_000_000,  # expect: SCALER_SETTINGS
    )


def train(net, data, lr=1e-3):
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    scaler = make_scaler()
    mae = torch.nn.L1Loss()
    for x, y in data:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = mae(net(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return net

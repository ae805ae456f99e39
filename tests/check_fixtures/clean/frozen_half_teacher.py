"""A frozen half-precision teacher guides an fp32 student under autocast."""
import torch
import torch.nn.functional as F


def load_teacher(build, path):
    teacher = build()
    teacher.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return teacher.half().cuda().eval().requires_grad_(False)


def distill(student, teacher, loader, t=4.0):
    student = student.cuda()
    opt = torch.optim.AdamW(student.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        with torch.no_grad():
            goal = teacher(x.half()).float()
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = student(x)
            soft = F.kl_div(F.log_softmax(out / t, -1), F.log_softmax(goal / t, -1), log_target=True, reduction="batchmean")
            loss = F.cross_entropy(out, y) + t * t * soft
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

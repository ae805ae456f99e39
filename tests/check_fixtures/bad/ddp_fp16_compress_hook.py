import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP


def wrap(model, rank):
    ddp = DDP(model.to(rank), device_ids=[rank], gradient_as_bucket_view=True)
    ddp.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)  # expect: CONFIG_REDUCE_DTYPE
    return ddp


def train(model, loader, rank, lr=0.1):
    ddp = wrap(model, rank)
    opt = torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.9)
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(ddp(x.to(rank)), y.to(rank))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()


def main(build, loader):
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    torch.cuda.set_device(rank)
    train(build(), loader, rank)
    torch.distributed.destroy_process_group()

"""This process, as it introduces itself to the store."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from ..core.step import RunInfo


def run_info(trace_interval: int) -> RunInfo:
    together = dist.is_available() and dist.is_initialized()
    return RunInfo(
        started=time.time(),
        argv=tuple(sys.argv),
        torch=torch.__version__,
        world_size=dist.get_world_size() if together else int(os.environ.get("WORLD_SIZE", "1") or 1),
        rank=dist.get_rank() if together else int(os.environ.get("RANK", "0") or 0),
        meta={"trace_interval": trace_interval, "threads": torch.get_num_threads(), "cuda": torch.cuda.is_available()},
    )

"""Starts one program in several processes that train together, and never waits for longer than was said.

    results = run_job("ddp", 2, folder)        # tests/distributed/programs/ddp.py; what its `main` returned on each rank

A program is a module with `main(rank, world, folder)`, run after the gloo group is there. All processes of a job are in one
group of the system, which is killed when the job is over, whatever became of it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 900.0  # a guard against waiting for ever; a busy machine takes minutes to import torch


class Hung(AssertionError):
    """A process of the job was still there when its time was over."""


def run_job(program: str, world: int, folder: Path, *words: str, seconds: float = SECONDS, deaths: int = 0) -> list[Any]:
    """The results by rank; None for a rank that died, of which `deaths` are expected."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "127.0.0.1",  # asked for by frameworks, although the group is there
        "MASTER_PORT": "0",
    }
    command = [sys.executable, "-m", "distributed.job", program, str(folder), *words]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            with (folder / f"rank{rank}.txt").open("wb") as said:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=said,
                        stderr=said,
                        cwd=folder,
                        process_group=0 if not processes else processes[0].pid,
                    )
                )
        _wait(processes, seconds, folder)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(processes[0].pid, signal.SIGKILL)
            process.wait()
    found = [folder / f"rank{rank}.json" for rank in range(world)]
    results = [json.loads(path.read_text()) if path.exists() else None for path in found]
    dead = [rank for rank, result in enumerate(results) if result is None]
    assert len(dead) == deaths, "\n".join(f"rank {rank}:\n{said_by(folder, rank)}" for rank in dead)
    return results


def said_by(folder: Path, rank: int) -> str:
    return (folder / f"rank{rank}.txt").read_text(errors="replace")


def collectives_of(work: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and how many operations between processes this one took part in meanwhile, as their groups count them."""
    from torch.distributed.distributed_c10d import _world

    before = {group: group._get_sequence_number_for_group() for group in _world.pg_map}
    result = work()
    return result, sum(group._get_sequence_number_for_group() - before.get(group, 0) for group in _world.pg_map)


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float, folder: Path) -> None:
    until = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > until:
            late = [rank for rank, process in enumerate(processes) if process.poll() is None]
            raise Hung(f"ranks {late} after {seconds:g} s:\n" + "\n".join(said_by(folder, rank)[-2000:] for rank in late))
        time.sleep(0.05)


def main() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    program, folder, *words = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module = importlib.import_module(f"distributed.programs.{program}")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    result = module.main(rank, world, Path(folder), *words)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One of the programs of tests/integrations in several processes: alone, watched from outside, and by its integration."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from integrations.test_frameworks import program, watched_by_its_integration, watched_by_itself

from ..job import collectives_of

WAYS = {"by_itself": watched_by_itself, "integration": watched_by_its_integration}


def main(rank: int, world: int, folder: Path, name: str) -> dict[str, list[bool]]:
    from task import fingerprint

    results = {}
    for fault in ("data", "no-data"):
        model, asked = collectives_of(lambda fault=fault: program(name).train(fault))
        alone = fingerprint(model)
        dist.barrier()
        for how, watch in WAYS.items():
            at = folder / f"{fault}_{how}"
            (_, model), asked_seen = collectives_of(lambda watch=watch, at=at, fault=fault: watch(name, at, fault))
            results[at.name] = [fingerprint(model) == alone, asked > 0, asked_seen == asked]
            dist.barrier()
    return results

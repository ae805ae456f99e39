"""Which ranks are replicas, told from their files alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nanny import cli
from nanny.core.step import GRADIENT_STATS, SAMPLE_STATS, RunInfo, Sample, Site
from nanny.store.packing import BITS, pack_bits
from nanny.store.writer import RunWriter

NAMES = ("a", "b")


def write(folder: Path, rank: int, weights: dict[int, list[int]], gradients: dict[int, list[int]], largest: float) -> None:
    """Checksums by step; nobody says whose replica this rank is."""
    writer = RunWriter(folder, RunInfo(1000.0, world_size=2, rank=rank, meta={"replicas": [], "shards": {}}))
    for kind in ("weight", "grad"):
        writer.add_sites([Site(kind, name, "float32", (4,)) for name in NAMES])
    for step in weights:
        for kind, stats, words in (("weight", SAMPLE_STATS, weights[step]), ("grad", GRADIENT_STATS, gradients[step])):
            columns = {name: np.ones(2) for name in stats} | pack_bits(np.array(words, np.int64), [0, 0])
            columns["max"] = np.full(2, largest)
            writer.add_sample(
                Sample(kind, step, (*stats, *BITS), np.array([columns[n] for n in (*stats, *BITS)], "<f4").tobytes())
            )
        writer.add_scalars(step, {"loss": 1.0, "updates": float(step)})
    writer.close()


@pytest.mark.parametrize(
    ("of_other", "largest", "apart"),
    [
        ({0: [5, 6], 10: [7, 8]}, 2.0, True),  # averaged by hand, and the weights were drawn apart
        ({0: [5, 6], 10: [5, 6]}, 2.0, False),  # the same twice: nobody trains with that
        ({0: [5, 6], 10: [7, 9]}, 2.0, False),  # only some are alike: a gradient that the batch alone decides
        ({0: [15, 16], 10: [17, 18]}, 2.0, False),  # two trainings
        ({0: [5, 6], 10: [7, 8]}, 1.0, False),  # constants
    ],
)
def test_gradients_that_are_alike_make_replicas_of_weights_that_are_not(of_other, largest, apart, tmp_path, capsys):
    of_first = {0: [5, 6], 10: of_other[10] if of_other[10] == of_other[0] else [7, 8]}
    write(tmp_path, 0, {0: [1, 2], 10: [3, 4]}, of_first, largest)
    write(tmp_path, 1, {0: [11, 12], 10: [13, 14]}, of_other, largest)
    cli.main(["summary", "--db", str(tmp_path), "--format", "json"])
    assert ("replicas_apart in a at step 0" in json.loads(capsys.readouterr().out)["verdict"]) == apart

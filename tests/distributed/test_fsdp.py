"""FSDP2 over two processes gives every variant the gradients of the unsharded model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from satlens.models.presets import VARIANTS

WORKER = Path(__file__).with_name("fsdp_worker.py")
COMPOSED = ("rd-attnres+satformer", "muddformer+resformer", "hyperconnections+satformer")
RELATIVE = 1e-9
"""In float64, where sums in another order differ by 1e-13."""


def run_ranks(variants, folder, world_size=2):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(folder / "store"), *variants],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, stderr) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, stderr[-3000:]
    return [json.loads(line) for line in outputs[0][0].splitlines()]


@pytest.mark.skipif(sys.platform != "linux", reason="gloo over a file store")
def test_sharded_gradients_equal_unsharded_ones(tmp_path):
    variants = [*VARIANTS, *COMPOSED]
    found = run_ranks(variants, tmp_path)
    assert [name for name, *_ in found] == variants
    for name, plain, checkpointed in found:
        assert plain <= RELATIVE, name
        assert checkpointed <= RELATIVE, name

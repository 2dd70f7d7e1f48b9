"""Compiled runs against the same runs as they are: losses, signals, and how much is compiled.

Most use torch's backend ``aot_eager``: what is traced, differentiated and cut into graphs is the
same as under its code generator, which takes most of the time.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from small_runs import lines, model_config, train_config
from torch._dynamo.utils import counters

from satlens.config import to_dict
from satlens.data.dataset import PreparedDataset
from satlens.models.decoder import Decoder
from satlens.models.presets import VARIANTS
from satlens.training import train

WORKER = Path(__file__).with_name("compile_worker.py")
EVERY = {"log_every": 1, "eval_every": 10, "checkpoint_every": 100}


@pytest.fixture(autouse=True)
def _compiling() -> Iterator[None]:
    """As outside tests, whose shape checks cannot be compiled; nothing left of other tests."""
    before, backend = jaxtyping.config.jaxtyping_disable, torch.compiler.get_default_backend()
    jaxtyping.config.update("jaxtyping_disable", True)
    torch.compiler.set_default_backend("aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.compiler.set_default_backend(backend)
    jaxtyping.config.update("jaxtyping_disable", before)


def assert_same_run(found: Path, expected: Path) -> None:
    """Losses and gradient norms within 1e-5, and every signal of the evaluation passes."""
    for kind in ("train", "eval"):
        pairs = list(zip(lines(found, kind), lines(expected, kind), strict=True))
        assert pairs
        for mine, one in pairs:
            assert mine == pytest.approx(one, abs=1e-5), (kind, one["step"])


def run(dataset: PreparedDataset, out: Path, name: str, **recipe: Any) -> Path:
    steps = recipe.pop("steps", 20)
    cfg = train_config(steps, **{**EVERY, **recipe})
    train(model_config(name, n_layers=2), cfg, dataset, out, progress="none", device="cpu")
    return out


def test_a_compiled_run_is_the_run(dataset: PreparedDataset, tmp_path: Path) -> None:
    """One graph with document masks and one without, whole; evaluation has its signals."""
    plain = run(dataset, tmp_path / "plain", "satformer")
    assert not counters["stats"]
    compiled = run(
        dataset, tmp_path / "compiled", "satformer", compile=True, gradient_checkpointing=True
    )
    assert_same_run(compiled, plain)
    assert "open_fraction/L1.attn.v" in lines(compiled, "eval")[-1]
    assert not counters["graph_break"]
    assert 1 <= counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
def test_generated_code_gives_the_losses(dataset: PreparedDataset, tmp_path: Path) -> None:
    """The same with torch's own code generator, under the recipe's bf16 too."""
    torch.compiler.set_default_backend("inductor")
    plain = run(dataset, tmp_path / "plain", "satformer")
    compiled = run(dataset, tmp_path / "compiled", "satformer", compile=True)
    assert_same_run(compiled, plain)
    rough = run(dataset, tmp_path / "bf16", "satformer", compile=True, precision="bf16")
    for mine, one in zip(lines(rough, "train"), lines(plain, "train"), strict=True):
        assert mine["loss"] == pytest.approx(one["loss"], abs=3e-2)


def test_what_is_compiled_and_what_is_not() -> None:
    """Copies, hooks left in place and partial passes run as they are."""
    model = Decoder(model_config("transformer", n_layers=1), seed=3)
    tokens = torch.arange(96).view(3, 32)
    given = {"tokens": tokens, "return_type": "loss", "documents": tokens // 20}
    names, state = list(model.hook_dict), list(model.state_dict())
    compiled = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph

    model.compile(backend=backend, fullgraph=True)
    assert list(model.hook_dict) == names and list(model.state_dict()) == state
    with torch.no_grad():
        expected = copy.deepcopy(model)(**given)
        model(tokens, stop_at_layer=1)
        model.add_hook("blocks.0.hook_mlp_out", lambda out, hook: 2 * out)
        assert model(**given) != expected
        model.reset_hooks()
        assert not compiled
        assert (model(**given) - expected).abs() <= 1e-6
        assert compiled == 1
        assert model(**given) == model(**given)
        assert compiled == 1


# -- in other processes -------------------------------------------------------------------------

STREAMS = ["satformer", "attnres", "rd-attnres", "hyperconnections", "denseformer", "muddformer"]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "names"), [(None, list(VARIANTS)), ("fsdp", STREAMS)])
def test_passes_of_every_variant(strategy: str | None, names: list[str]) -> None:
    """One graph, or a graph a block, for all documents; layers that do the same share one."""
    configs = [model_config(name) for name in names] + [model_config("satformer", n_layers=6)]
    cases = json.dumps([[to_dict(cfg), strategy] for cfg in configs])
    done = subprocess.run(
        [sys.executable, str(WORKER), "passes", cases], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for cfg, (difference, graphs, breaks) in zip(configs, found, strict=True):
        assert difference <= 1e-6, cfg
        assert not breaks, cfg
        # The first layer of satformer has no gate; those after it are all alike.
        alike = cfg.stream.kind == "residual" and strategy == "fsdp"
        assert graphs == (2 if alike else 1 if strategy is None else cfg.n_layers), cfg


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="gloo")
def test_compiled_processes_give_the_losses_of_one(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    """DDP and FSDP, with blocks run again and with a parameter that gets no gradient."""
    again = {"gradient_checkpointing": True}
    jobs: dict[str, tuple[str, dict[str, Any]]] = {
        "ddp": ("satformer", {"strategy": "ddp"}),
        "fsdp": ("satformer", {"strategy": "fsdp"}),
        "dead-ddp": ("rd-attnres", {"strategy": "ddp", **again}),
        "dead-fsdp": ("rd-attnres", {"strategy": "fsdp", **again}),
    }
    given = [
        [name, to_dict(model_config(arch, n_layers=2)), to_dict(train_config(20, **options))]
        for name, (arch, changes) in jobs.items()
        for options in [{**EVERY, **changes, "compile": True}]
    ]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(WORKER),
                "runs",
                str(dataset.path),
                str(tmp_path),
                json.dumps(given),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), **shared},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=500)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0, error[-3000:]
    for arch in ("satformer", "rd-attnres"):
        run(dataset, tmp_path / arch, arch)
    for name, (arch, _) in jobs.items():
        assert_same_run(tmp_path / name, tmp_path / arch)
    for rank in range(2):
        for name, (graphs, breaks) in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            assert not breaks, (name, breaks)
            assert 1 <= graphs <= (4 if "fsdp" in name else 2), name

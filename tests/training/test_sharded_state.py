"""The state of a sharded run: whole again, and cut anew, always to the bit."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from safetensors.torch import load_file, save_file
from small_disk import Disk, may_mount
from small_runs import model_config, train_config

import satlens
from satlens.checkpoints import save
from satlens.errors import CheckpointError
from satlens.models.decoder import Decoder
from satlens.processes import world
from satlens.training.distributed import shared
from satlens.training.optimiser import make_optimiser
from satlens.training.resume import ResumePoint, consolidated, load_state, save_state
from satlens.training.state_tensors import Holders

MODEL = {"name": "attnres", "n_layers": 1, "d_vocab": 37, "value_residual": "satformer"}
POINT = ResumePoint(2, 300, 40, "0" * 64)


class Part:
    """What this process holds of a run that uses ``strategy``."""

    def __init__(self, strategy: str) -> None:
        # An odd vocabulary, and scalars: parts of unequal size, and empty ones.
        self.model = Decoder(model_config(**MODEL), seed=3)
        cfg = train_config(strategy=strategy)
        self.runner = shared(self.model, cfg, torch.device("cpu"))
        self.optimiser = make_optimiser(self.model, cfg)
        self.counters = {"sum": torch.zeros((), dtype=torch.float64), "window": torch.zeros(3)}

    def train(self) -> None:
        """Two steps on the same rows in every process, then a pass that keeps weights whole."""
        tokens = torch.arange(64).reshape(2, 32) % 37
        for _ in range(2):
            self.runner(tokens, return_type="loss").backward()
            self.optimiser.step()
            self.optimiser.zero_grad()
        self.counters["sum"].fill_(1 / 3)
        self.counters["window"].copy_(torch.tensor([1.0, float("nan"), -0.0]))
        with torch.no_grad():
            self.model(tokens)

    @property
    def state(self) -> tuple:
        return self.model, self.optimiser, self.counters

    def whole(self) -> dict[str, torch.Tensor]:
        """Every tensor in full, as integers: NaN equals itself, -0 is not 0."""
        tensors = Holders(*self.state).tensors()
        whole = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in tensors.items()}
        return {
            n: t.view(torch.int64 if t.itemsize == 8 else torch.int32) for n, t in whole.items()
        }


def write(folder: Path, strategy: str) -> None:
    """Save a state, what is in it, and the model as a checkpoint."""
    part = Part(strategy)
    part.train()
    save_state(folder / "resume", POINT, *part.state)
    tensors, model = part.whole(), consolidated(part.model)
    assert (model is None) == (world().rank > 0)
    if model is not None:
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "expected")
        save(model, folder / "checkpoint")


def check(folder: Path, strategy: str) -> None:
    """Load a state: every bit of it is there, and in the checkpoint made of it."""
    part, notes = Part(strategy), []
    assert load_state(folder / "resume", *part.state, notes.append) == POINT
    assert not notes
    found, expected = part.whole(), load_file(folder / "expected")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    model = consolidated(part.model)
    if model is not None:
        for name, parameter in satlens.load(folder / "checkpoint").named_parameters():
            mine = model.get_parameter(name)
            assert mine.device.type == "cpu"
            assert torch.equal(mine, parameter), name
            assert f"model.{name}" in expected


def test_a_state_goes_into_any_number_of_processes_and_either_strategy(tmp_path: Path) -> None:
    fsdp_2, fsdp_3, ddp_2 = (tmp_path / name for name in ("fsdp-2", "fsdp-3", "ddp-2"))

    def two() -> None:
        write(fsdp_2, "fsdp")
        write(ddp_2, "ddp")

    def three() -> None:
        write(fsdp_3, "fsdp")
        check(fsdp_2, "fsdp")
        check(ddp_2, "fsdp")

    def two_again() -> None:
        check(fsdp_3, "fsdp")
        check(fsdp_3, "ddp")
        check(fsdp_2, "fsdp")

    def one() -> None:
        for folder in (fsdp_2, fsdp_3, ddp_2):
            check(folder, "fsdp")

    for folder in (fsdp_2, fsdp_3, ddp_2):
        folder.mkdir()
    for size, body in ((2, two), (3, three), (2, two_again), (1, one)):
        run_ranks(size, body, tmp_path / body.__name__)
    for folder, parts in ((fsdp_2, 2), (fsdp_3, 3), (ddp_2, 1)):
        files = sorted(path.name for path in (folder / "resume" / "000000002").iterdir())
        assert len(files) == parts + 1
        assert all(name == "state.json" or name.endswith(".safetensors") for name in files)


# -- faults of one process are faults of all -------------------------------------------------------


def refused(body: Callable[[], object]) -> str:
    """The line that this and every other process ends with."""
    with pytest.raises(CheckpointError) as caught:
        body()
    lines: list[str] = [""] * world().size
    dist.all_gather_object(lines, str(caught.value))
    assert len(set(lines)) == 1, lines
    assert "\n" not in lines[0]
    return lines[0]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def change(file: Path, how: str) -> None:
    """Damage a file, in process 0, once all have found it."""
    dist.barrier()
    if world().rank == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content if how == "flipped" else content[:-5])
        if how == "missing":
            file.unlink()
    dist.barrier()


def names(folder: Path) -> list[str]:
    """What is in a folder, before any process writes there again."""
    found = [path.name for path in folder.iterdir()]
    dist.barrier()
    return found


def faults(folder: Path, mounts: bool) -> None:
    part, notes, resume = Part("fsdp"), [], folder / "resume"
    part.train()
    save_state(resume, POINT, *part.state)
    later = ResumePoint(4, 600, 80, "0" * 64)
    place = resume / "000000004"

    # The disk of the second process alone is full.
    with pytest.MonkeyPatch.context() as patch:
        if world().rank == 1:
            patch.setattr("torch.distributed.checkpoint.filesystem.os.fsync", full)
        line = refused(lambda: save_state(resume, later, *part.state))
    assert line == f"{place}: cannot be written (No space left on device)"
    assert names(resume) == ["000000002"]

    # A folder that only looks the same to the second process.
    if mounts:
        disk = Disk(resume, "8m") if world().rank == 1 else None
        line = refused(lambda: save_state(resume, later, *part.state))
        assert line.startswith(f"{place}: shard-00002-")
        assert line.endswith("was written to another disk; all processes must see the same folder")
        if disk is not None:
            disk.unmount()
        assert names(resume) == ["000000002"]

    for how, reason in (
        ("flipped", "sha256: differs from state.json, damaged"),
        ("truncated", "sha256: differs from state.json, damaged"),
        ("missing", "is missing, but state.json lists it"),
    ):
        save_state(resume, later, *part.state)
        shard = sorted(place.glob("*.safetensors"))[1]
        change(shard, how)
        assert load_state(resume, *part.state, notes.append) == POINT
        assert notes.pop() == f"{shard}: {reason}; trying an earlier state"
        assert names(resume) == ["000000002"]

    other = model_config(**{**MODEL, "d_vocab": 41})
    model = Decoder(other, seed=3)
    shared(model, train_config(strategy="fsdp"), torch.device("cpu"))
    optimiser = make_optimiser(model, train_config())
    line = refused(lambda: load_state(resume, model, optimiser, part.counters, notes.append))
    assert line == (
        f"{resume / '000000002'}: model.embed.weight: torch.float32 [37, 32], "
        "torch.float32 [41, 32] expected"
    )
    change(sorted(resume.glob("*/*.safetensors"))[0], "truncated")
    line = refused(lambda: load_state(resume, *part.state, notes.append))
    assert line.endswith(f"no other state is whole: remove {resume} to train again")


def test_a_fault_in_one_process_is_one_line_in_all_and_loses_nothing(tmp_path: Path) -> None:
    mounts = may_mount(tmp_path)
    run_ranks(2, lambda: faults(tmp_path, mounts), tmp_path / "ranks")

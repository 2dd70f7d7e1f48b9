"""Resumable state: what a run needs to go on as if it had never stopped.

    resume/<step>/*.safetensors  fp32 weights, AdamW's moments and steps, running counters:
                                 state.safetensors, or each process its shards under FSDP2
    resume/<step>/state.json     written last in a folder renamed into place: step, positions in
                                 metrics.jsonl and timing.jsonl, SHA-256 of every file, of the
                                 metrics so far and of all that it says itself

Data order, learning rate and evaluation are functions of the step, and nothing in training draws
random numbers, so there is no generator state to keep. A state is of no number of processes and of
no strategy: whatever wrote it, the values come back to the bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from satlens.checkpoints.files import file_sha256, json_bytes, new_folder, plain_name, read_json
from satlens.errors import CheckpointError
from satlens.processes import world
from satlens.training.distributed import together
from satlens.training.run_folder import remove_tree
from satlens.training.state_tensors import (
    READ,
    WRITTEN,
    Holders,
    consolidated,
    everywhere,
    one_line,
    read_tensors,
    write_tensors,
)

FORMAT = "satlens-resume"
VERSION = 2
KEPT = 2
"""Newest states kept: the second is there for the day when the disk damages the first."""

_MANIFEST = "state.json"


class ResumePoint(NamedTuple):
    """Where a run goes on."""

    step: int
    """Finished steps."""
    metrics_bytes: int
    timing_bytes: int
    metrics_sha256: str
    """Of those bytes of metrics.jsonl."""


START = ResumePoint(0, 0, 0, hashlib.sha256().hexdigest())


def save_state(
    folder: Path,
    point: ResumePoint,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    counters: dict[str, Tensor],
) -> None:
    """Write the state of a run under ``folder/<step>`` and drop all but the newest two.

    Every process of the run must call this; the folder is one that all of them see.

    Raises:
        CheckpointError: (in every process) it cannot be written; what was there before is
            untouched.
    """
    place = folder / f"{point.step:09d}"
    with ExitStack() as drafts:  # in process 0; an error of any process removes the draft
        draft = together(lambda: drafts.enter_context(new_folder(place, replace=False)))
        digests = _digests(write_tensors(draft, place, Holders(model, optimiser, counters)), place)

        def complete() -> None:
            for name in digests:
                if not (draft / name).exists():
                    raise CheckpointError(
                        f"{place}: {name} was written to another disk; all processes must see the "
                        "same folder"
                    )
            manifest = {"format": FORMAT, "version": VERSION, **point._asdict(), "sha256": digests}
            manifest["checksum"] = _checksum(manifest)
            with one_line(place, WRITTEN):
                (draft / _MANIFEST).write_bytes(json_bytes(manifest, _MANIFEST))
                drafts.close()
                for old in _states(folder)[KEPT:]:
                    remove_tree(old)

        together(complete)


def load_state(
    folder: Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    counters: dict[str, Tensor],
    note: Callable[[str], None],
) -> ResumePoint | None:
    """Restore the newest complete state in place; None if there never was one.

    Every process of the run must call this, and all restore the same state.

    Args:
        counters: tensors to fill, under the names they were saved with.
        note: told about each damaged state that is passed over.

    Raises:
        CheckpointError: (in every process) states exist and none of them is whole, or one does
            not fit the model.
    """
    fault = ""
    states = together(lambda: _states(folder))
    for number, place in enumerate(states):
        try:
            point = _verified(place)
        except CheckpointError as error:
            fault = str(error)
            note(f"{fault}; trying an earlier state")
            continue
        holders = Holders(model, optimiser, counters)
        everywhere(lambda place=place, holders=holders: read_tensors(place, holders), place, READ)
        for later in states[:number]:  # damaged, and due to be written again
            together(lambda later=later: remove_tree(later))
        return point
    if fault:
        raise CheckpointError(f"{fault}; no other state is whole: remove {folder} to train again")
    return None


def _states(folder: Path) -> list[Path]:
    """Folders of states, newest first."""
    if not folder.is_dir():
        return []
    with one_line(folder, READ):
        return sorted((p for p in folder.iterdir() if p.name.isdigit()), reverse=True)


def _digests(mine: list[Path], place: Path) -> dict[str, str]:
    """SHA-256 of the files of all processes, by name.

    Args:
        mine: those that this process reads, of the state at ``place``.
    """
    parts = everywhere(lambda: {file.name: file_sha256(file) for file in mine}, place, READ)
    return {name: digest for part in parts for name, digest in part.items()}


def _verified(place: Path) -> ResumePoint:
    """Check that a state is complete and undamaged.

    Raises:
        CheckpointError: (in every process) names the file and the field.
    """
    manifest = together(lambda: _read_manifest(place / _MANIFEST))
    (rank, size), files = world(), together(lambda: sorted(place.glob("*.safetensors")))
    found = _digests(files[rank::size], place)
    for name, digest in manifest["sha256"].items():
        if name not in found:
            raise CheckpointError(f"{place / name}: is missing, but {_MANIFEST} lists it")
        if found[name] != digest:
            raise CheckpointError(f"{place / name}: sha256: differs from {_MANIFEST}, damaged")
    for name in found:
        if name not in manifest["sha256"]:
            raise CheckpointError(f"{place / name}: {_MANIFEST} does not list it")
    return ResumePoint(*(manifest[field] for field in ResumePoint._fields))


def _read_manifest(file: Path) -> dict[str, Any]:
    manifest = read_json(file)
    for field, expected in (("format", FORMAT), ("version", VERSION)):
        if manifest.get(field) != expected:
            raise CheckpointError(
                f"{file}: {field}: {manifest.get(field)!r}, this satlens reads {expected!r}"
            )
    for field in ("step", "metrics_bytes", "timing_bytes"):
        if type(manifest.get(field)) is not int or manifest[field] < 0:
            raise CheckpointError(f"{file}: {field}: missing or not a number")
    if manifest["step"] != int(file.parent.name):
        raise CheckpointError(f"{file}: step: {manifest['step']} in folder {file.parent.name}")
    digests = manifest.get("sha256")
    if not isinstance(digests, dict) or not digests:
        raise CheckpointError(f"{file}: sha256: lists no file")
    for name in digests:
        plain_name(name, f"{file}: sha256")
    if manifest.get("checksum") != _checksum(manifest):
        raise CheckpointError(f"{file}: checksum: the file was changed or damaged")
    return manifest


def _checksum(manifest: dict[str, Any]) -> str:
    """SHA-256 over everything in a manifest but itself."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


__all__ = ["START", "ResumePoint", "consolidated", "load_state", "save_state"]

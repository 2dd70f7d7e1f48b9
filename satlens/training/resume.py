"""Resumable state: what a run needs to go on as if it had never stopped.

    resume/<step>/state.safetensors   fp32 weights, AdamW's moments and steps, running counters
    resume/<step>/state.json          written last in a folder renamed into place: step, positions
                                      in metrics.jsonl and timing.jsonl, SHA-256 of the tensors

Data order, learning rate and evaluation are functions of the step, and nothing in training draws
random numbers, so there is no generator state to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from satlens.checkpoints.files import file_sha256, json_bytes, new_folder, read_json
from satlens.errors import CheckpointError
from satlens.training.run_folder import remove_tree

FORMAT = "satlens-resume"
VERSION = 1
KEPT = 2
"""Newest states kept: the second is there for the day when the disk damages the first."""

_TENSORS = "state.safetensors"
_MANIFEST = "state.json"


class ResumePoint(NamedTuple):
    """Where a run goes on."""

    step: int
    """Finished steps."""
    metrics_bytes: int
    timing_bytes: int


def save_state(
    folder: Path,
    point: ResumePoint,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    counters: dict[str, Tensor],
) -> None:
    """Write the state of a run under ``folder/<step>`` and drop all but the newest two.

    Raises:
        CheckpointError: it cannot be written; what was there before is untouched.
    """
    tensors = {name: t.detach().contiguous().cpu() for name, t in _named(model, optimiser).items()}
    tensors |= {f"counters.{name}": t.cpu() for name, t in counters.items()}
    place = folder / f"{point.step:09d}"
    with new_folder(place, replace=False) as draft:
        save_file(tensors, draft / _TENSORS)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            **point._asdict(),
            "sha256": {_TENSORS: file_sha256(draft / _TENSORS)},
        }
        (draft / _MANIFEST).write_bytes(json_bytes(manifest, _MANIFEST))
    for old in _states(folder)[KEPT:]:
        remove_tree(old)


def load_state(
    folder: Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    counters: dict[str, Tensor],
    note: Callable[[str], None],
) -> ResumePoint | None:
    """Restore the newest complete state in place; None if there never was one.

    Args:
        counters: tensors to fill, under the names they were saved with.
        note: told about each damaged state that is passed over.

    Raises:
        CheckpointError: states exist and none of them is whole, or one does not fit the model.
    """
    if not folder.is_dir():
        return None
    fault = ""
    states = _states(folder)
    for number, place in enumerate(states):
        try:
            point, tensors = _read(place)
        except CheckpointError as error:
            fault = str(error)
            note(f"{fault}; trying an earlier state")
            continue
        _restore(place, tensors, model, optimiser, counters)
        for later in states[:number]:  # damaged, and due to be written again
            remove_tree(later)
        return point
    if fault:
        raise CheckpointError(f"{fault}; no other state is whole: remove {folder} to train again")
    return None


def _states(folder: Path) -> list[Path]:
    """Folders of states, newest first."""
    return sorted((p for p in folder.iterdir() if p.name.isdigit()), reverse=True)


def _named(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the state by name; a parameter without a gradient has no optimiser state."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter
        for key, value in optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser.{key}.{name}"] = value
    return tensors


def _read(place: Path) -> tuple[ResumePoint, dict[str, Tensor]]:
    """A complete state from disk; every fault is a CheckpointError naming file and field."""
    manifest = _read_manifest(place / _MANIFEST)
    file = place / _TENSORS
    if file_sha256(file) != manifest["sha256"][_TENSORS]:
        raise CheckpointError(f"{file}: sha256: differs from {_MANIFEST}, damaged")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: {error}") from None
    return ResumePoint(*(manifest[field] for field in ResumePoint._fields)), tensors


def _read_manifest(file: Path) -> dict[str, Any]:
    manifest = read_json(file)
    for field, expected in (("format", FORMAT), ("version", VERSION)):
        if manifest.get(field) != expected:
            raise CheckpointError(
                f"{file}: {field}: {manifest.get(field)!r}, this satlens reads {expected!r}"
            )
    for field in ResumePoint._fields:
        if not isinstance(manifest.get(field), int):
            raise CheckpointError(f"{file}: {field}: missing or not a number")
    digests = manifest.get("sha256")
    if not isinstance(digests, dict) or _TENSORS not in digests:
        raise CheckpointError(f"{file}: sha256: has no digest of {_TENSORS}")
    return manifest


def _restore(
    place: Path,
    tensors: dict[str, Tensor],
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    counters: dict[str, Tensor],
) -> None:
    """Copy a state into the model, the optimiser and the counters, leaving nothing over."""
    file, left = place / _TENSORS, dict(tensors)

    def take(key: str, like: Tensor) -> Tensor:
        tensor = left.pop(key, None)
        if tensor is None:
            raise CheckpointError(f"{file}: {key}: missing")
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise CheckpointError(
                f"{file}: {key}: {tensor.dtype} {[*tensor.shape]}, "
                f"{like.dtype} {[*like.shape]} expected"
            )
        return tensor

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(take(f"model.{name}", parameter))
            suffix = f".{name}"
            if f"optimiser.step{suffix}" not in left:
                continue
            moments = ("exp_avg", "exp_avg_sq")
            state = {key: take(f"optimiser.{key}{suffix}", parameter) for key in moments}
            step = take(f"optimiser.step{suffix}", torch.zeros(()))
            optimiser.state[parameter] = {
                key: value.to(parameter.device) for key, value in ({"step": step} | state).items()
            }
        for name, counter in counters.items():
            counter.copy_(take(f"counters.{name}", counter))
    for key in left:
        raise CheckpointError(f"{file}: {key}: unexpected")

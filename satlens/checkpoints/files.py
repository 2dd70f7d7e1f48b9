"""Files of a checkpoint: reading without trust, writing without halves."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from satlens.errors import CheckpointError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_WEIGHTS = "pytorch_model.bin"
TOKENIZER = "tokenizer.json"
TRAINING = "training.json"

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# First bytes of torch.save's zip archive and of pickle protocols 2 to 5.
_PICKLES = (b"PK\x03\x04", *(bytes((0x80, protocol)) for protocol in range(2, 6)))


# -- reading ------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: no such file, not UTF-8, not JSON, not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({_reason(error)})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def plain_name(name: object, where: str) -> str:
    """A file name that stays in its folder.

    Raises:
        CheckpointError: an absolute path, one with folders or ``..``, or no text.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[^/\\:\0]+", name) or name in (".", ".."):
        raise CheckpointError(f"{where}: {name!r} is not a plain file name; refused")
    return name


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a checkpoint folder.

    Raises:
        CheckpointError: there are none, or one is a pickle under another name.
    """
    if (folder / WEIGHTS).exists():
        files = [folder / WEIGHTS]
    elif (folder / INDEX).exists():
        files = [folder / name for name in sorted(set(_weight_map(folder / INDEX).values()))]
    elif (folder / TORCH_WEIGHTS).exists():
        return [folder / TORCH_WEIGHTS]
    else:
        raise CheckpointError(f"{folder}: has no {WEIGHTS}")
    for file in files:
        _refuse_pickle(file)
    return files


def has_weights(folder: Path) -> bool:
    """Whether a checkpoint folder holds any file of weights that :func:`weight_files` knows."""
    return any((folder / name).exists() for name in (WEIGHTS, INDEX, TORCH_WEIGHTS))


def _weight_map(index: Path) -> dict[str, str]:
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError(f"{index}: weight_map: missing or empty")
    return {name: plain_name(file, f"{index}: weight_map") for name, file in entries.items()}


def _refuse_pickle(file: Path) -> None:
    """Say what a pickle under a safetensors name is.

    A safetensors file begins with the length of its header, which can have a pickle's first bytes;
    the header, from byte 8, begins with a brace.
    """
    try:
        with file.open("rb") as stream:
            start = stream.read(9)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({_reason(error)})") from None
    if start.startswith(_PICKLES) and start[8:] != b"{":
        raise CheckpointError(
            f"{file}: is a pickle (torch.save), not safetensors; refused, as unpickling runs code"
        )


def read_weights(files: Sequence[Path]) -> dict[str, Tensor]:
    """Every tensor of the given files, on the CPU, checked to be finite floating point.

    Raises:
        CheckpointError: a damaged or unsafe file, a tensor that is twice there, missing from the
            index, not floating point or not finite.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        read = _read_torch if file.name == TORCH_WEIGHTS else _read_safetensors
        for raw, tensor in read(file).items():
            name = raw.removeprefix("_orig_mod.")  # what torch.compile's wrapper adds
            if name in tensors:
                raise CheckpointError(f"{file}: tensor {name} is there twice")
            _require_finite(name, tensor, file)
            tensors[name] = tensor
    index = files[0].parent / INDEX
    if files[0].name not in (WEIGHTS, TORCH_WEIGHTS):
        for raw, file in _weight_map(index).items():
            if raw.removeprefix("_orig_mod.") not in tensors:
                raise CheckpointError(f"{index}: weight_map: {raw} is not in {file}")
    return tensors


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as stream:
            return {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not a sound safetensors file ({_reason(error)})") from None


def _read_torch(file: Path) -> dict[str, Tensor]:
    """``pytorch_model.bin`` through torch's restricted unpickler: tensors and containers only."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for damaged or hostile archives
        banned = re.search(r"(?:GLOBAL|class|function) ([\w.]+)", str(error))
        reason = f"it asks to run {banned[1]}" if banned else _reason(error)
        raise CheckpointError(f"{file}: refused to unpickle more than tensors ({reason})") from None
    if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
        raise CheckpointError(f"{file}: expected a table of tensors, found something else")
    return content


def _require_finite(name: str, tensor: Tensor, file: Path) -> None:
    if tensor.dtype not in FLOATS:
        raise CheckpointError(f"{file}: tensor {name} has dtype {tensor.dtype}, not a plain float")
    if not torch.isfinite(tensor).all():
        what = "NaN" if torch.isnan(tensor).any() else "infinite values"
        raise CheckpointError(f"{file}: tensor {name} contains {what}")


def file_sha256(file: Path) -> str:
    """SHA-256 of a file, hex."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({_reason(error)})") from None


def sha256_of(files: Sequence[Path], known: dict[str, str]) -> str:
    """One SHA-256 for several files: of the lines ``<hash>  <name>`` in order of name.

    Args:
        known: hashes that were computed already, by file name.
    """
    lines = [f"{known.get(f.name) or file_sha256(f)}  {f.name}\n" for f in files]
    return hashlib.sha256("".join(sorted(lines, key=lambda s: s[66:])).encode()).hexdigest()


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# -- writing ------------------------------------------------------------------------------------


def json_bytes(content: dict[str, Any], name: str) -> bytes:
    """A JSON file's bytes.

    Raises:
        CheckpointError: something JSON cannot hold, NaN included.
    """
    try:
        text = json.dumps(content, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name}: cannot be written as JSON ({error})") from None
    return (text + "\n").encode()


def write_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    """``model.safetensors`` of a folder that is being written."""
    # Clones: views of one fused matrix would otherwise be taken for shared memory.
    file = folder / WEIGHTS
    save_file({k: v.clone() for k, v in tensors.items()}, file, {"format": "pt"})
    # safetensors makes files for their owner alone; the others are as the user's umask says.
    file.chmod(folder.stat().st_mode & 0o666)


@contextmanager
def new_folder(path: Path, replace: bool) -> Iterator[Path]:
    """A hidden sibling folder that becomes ``path`` once the block has ended without an error.

    Raises:
        CheckpointError: ``path`` exists and may not be replaced, or the disk refuses.
    """
    _check_destination(path, replace)
    draft = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        yield draft
        for file in (*draft.iterdir(), draft):
            _flush(file)
        _put(draft, path)
        _flush(path.parent)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise CheckpointError(f"{path}: another writer made it meanwhile") from None
        raise CheckpointError(f"{path}: cannot be written ({_reason(error)})") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _check_destination(path: Path, replace: bool) -> None:
    if not path.exists():
        return
    if not replace:
        raise CheckpointError(f"{path}: exists already; nothing was written")
    if not (path.is_dir() and (path / CONFIG).exists()):
        raise CheckpointError(f"{path}: is no checkpoint folder, so it is not replaced")


def _put(draft: Path, path: Path) -> None:
    """Move the draft into place; a checkpoint already there trades places with it."""
    if not path.exists():
        draft.rename(path)
    elif not _exchange(draft, path):
        # Without an atomic exchange the old one steps aside first, under a name that says so.
        aside = draft.with_suffix(".old")
        path.rename(aside)
        draft.rename(path)
        shutil.rmtree(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step (Linux's renameat2); False where the system cannot."""
    at_cwd, exchange = -100, 2
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    return rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

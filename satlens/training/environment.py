"""Where a run happens: what run.json records of it, and torch's settings for its duration."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

import satlens
from satlens.config import ModelConfig, TrainConfig, to_dict
from satlens.data.dataset import PreparedDataset
from satlens.data.windows import Windows
from satlens.processes import world
from satlens.provenance import source_sha256
from satlens.training.allocator import keep_freed_memory
from satlens.training.plan import Plan


def run_record(
    model_cfg: ModelConfig,
    train_cfg: TrainConfig,
    dataset: PreparedDataset,
    windows: Windows,
    made: Plan,
    device: torch.device,
) -> dict[str, Any]:
    """Content of run.json."""
    cuda, size = device.type == "cuda", world().size
    return {
        "model": to_dict(model_cfg),
        "train": to_dict(train_cfg),
        "data": {"sha256": dataset.sha256, "tokenizer": dataset.fingerprint},
        "evaluation": {
            "sha256": windows.sha256,
            "n_documents": windows.n_documents,
            "n_tokens": windows.n_tokens,
        },
        "device": device.type,
        "plan": {"n_steps": made.n_steps, "tokens_per_step": made.tokens_per_step},
        "environment": {
            **code_identity(),
            "n_threads": torch.get_num_threads(),
            "processes": f"{size} ({train_cfg.strategy})" if size > 1 else "1",
            "device": torch.cuda.get_device_name(device)
            if cuda
            else torch.backends.cpu.get_cpu_capability(),
        },
    }


def changes(begun: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """What is not as when the run began and may change the last bits of every further step."""
    there, here = begun["environment"], record["environment"]
    changed = [name for name, value in here.items() if there.get(name) != value]
    default = TrainConfig()
    for name in ("gradient_checkpointing", "compile", "deterministic"):
        if begun["train"].get(name, getattr(default, name)) != record["train"][name]:
            changed.append(name)
    return changed


@cache
def code_identity() -> dict[str, str]:
    """Versions, and the SHA-256 over the sources that a trained weight depends on."""
    return {
        "satlens": satlens.__version__,
        "torch": str(torch.__version__),
        "code_sha256": source_sha256("config.py", "hooks.py", "data", "models", "training"),
    }


@contextmanager
def torch_settings(cfg: TrainConfig, device: torch.device) -> Iterator[None]:
    """Threads and deterministic kernels as the config says, and as before at the end."""
    if device.type == "cpu":
        keep_freed_memory()
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if cfg.n_threads is not None:
        torch.set_num_threads(cfg.n_threads)
    if cfg.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory finds bugs, costs time and changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            # A block may return a view of its input; nothing ever writes into one.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]

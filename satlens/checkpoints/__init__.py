"""Checkpoints: our folders and the published layouts, safetensors and JSON only.

A satlens checkpoint is a folder of ``config.json``, ``model.safetensors``, ``tokenizer.json``,
``training.json`` and ``manifest.json`` (the SHA-256 of each). Nothing is ever unpickled except
``pytorch_model.bin`` through ``weights_only=True``; nothing is silently re-initialised: after a
load every weight equals the file's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from satlens.checkpoints.files import (
    CONFIG,
    TOKENIZER,
    TRAINING,
    has_weights,
    json_bytes,
    new_folder,
    read_json,
    read_weights,
    sha256_of,
    weight_files,
    write_weights,
)
from satlens.checkpoints.hub import locate
from satlens.checkpoints.layouts import layout_named, layout_of
from satlens.checkpoints.manifest import verify, write_manifest
from satlens.config import ModelConfig
from satlens.data.tokenizers import backend, load_tokenizer, vocab_size
from satlens.errors import CheckpointError, ConfigError
from satlens.models.build import checked_device
from satlens.models.decoder import Decoder


def load(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    value_residual: str | None = None,
) -> Decoder:
    """Open a checkpoint in any supported layout, in eval mode.

    Args:
        path: a checkpoint folder, or ``org/name`` on the Hugging Face hub.
        device: where the weights go.
        dtype: of the weights; None keeps the file's (the widest, where a file mixes several).
        value_residual: ``"identity"`` reads a Llama layout as a ResFormer in identity mode, which
            its files cannot say.

    Returns:
        The model, with ``tokenizer`` (or None) and ``provenance``: checkpoint, sha256 (of config
        and weights), layout and training.

    Raises:
        CheckpointError: unreadable, damaged, unsafe, incomplete or in no known layout.
        ConfigError: a configuration that cannot be built or that satlens does not express; a
            device that is not there.
    """
    where = checked_device(device)
    folder = locate(path)
    config_file = folder / CONFIG
    config = read_json(config_file)
    layout = layout_of(config, str(config_file), value_residual)
    if not Path(path).exists() and not has_weights(folder):
        raise CheckpointError(f"{path}: has no safetensors weights; others are not fetched")
    weights = weight_files(folder)
    cfg = layout.model_config(config, str(config_file), value_residual)
    hashes = verify(folder, weights) if layout.has_manifest else {}
    state = layout.gather(cfg, read_weights(weights), str(weights[0]))
    model = _assemble(cfg, state, where, dtype)
    model.tokenizer = _tokenizer(folder, cfg)
    training = folder / TRAINING
    model.provenance = {
        "checkpoint": folder.name if Path(path).exists() else str(path),
        "sha256": sha256_of([config_file, *weights], hashes),
        "layout": layout.name,
        "training": read_json(training) if layout.has_manifest and training.exists() else None,
    }
    return model


def save(
    model: Decoder,
    path: str | Path,
    *,
    training: dict[str, Any] | None = None,
    layout: str = "satlens",
    replace: bool = False,
) -> Path:
    """Write a checkpoint folder: complete or not at all.

    Everything is written to a hidden sibling folder, flushed to disk and renamed.

    Args:
        path: the folder to make.
        training: what is known of the training (steps, tokens, identity of data and code).
        layout: ``satlens``, ``satformer_repo``, ``fla``, ``hf_llama``, ``hf_qwen3``,
            ``resformer_release``, ``muddformer_release`` or ``attnres_community``.
        replace: swap a checkpoint that is already there for the new one.

    Returns:
        The folder.

    Raises:
        CheckpointError: the destination exists (or is no checkpoint), or cannot be written.
        ConfigError: the layout cannot express this model, naming the field.
    """
    form = layout_named(layout)
    if training is not None and not form.has_manifest:
        raise ConfigError(f"training: the {layout} layout has no place for it")
    state = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    config, tensors = form.write(model.cfg, state)
    texts = {CONFIG: json_bytes(config, CONFIG)}
    if model.tokenizer is not None:
        texts[TOKENIZER] = backend(model.tokenizer).to_str(pretty=True).encode()
    if training is not None:
        texts[TRAINING] = json_bytes(training, TRAINING)
    with new_folder(Path(path), replace) as folder:
        for name, content in texts.items():
            (folder / name).write_bytes(content)
        write_weights(folder, tensors)
        if form.has_manifest:
            write_manifest(folder)
    return Path(path)


def _assemble(
    cfg: ModelConfig,
    state: dict[str, Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
) -> Decoder:
    """A model made of exactly these weights; no initialisation is drawn."""
    for tensor in state.values() if dtype is None else ():
        dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    with torch.device("meta"):
        model = Decoder(cfg, seed=None)
    owned = {k: v.to(device=device, dtype=dtype, copy=True) for k, v in state.items()}
    model.load_state_dict(owned, strict=True, assign=True)
    return model.requires_grad_(True).eval()


def _tokenizer(folder: Path, cfg: ModelConfig) -> Any:
    """The checkpoint's tokenizer; a table with more rows than tokens (padded) is legal."""
    file = folder / TOKENIZER
    if not file.exists():
        return None
    tokenizer = load_tokenizer(file)
    size = vocab_size(tokenizer)
    if size > cfg.d_vocab:
        raise CheckpointError(
            f"{file}: its {size} tokens exceed the vocabulary of {cfg.d_vocab} in {CONFIG}"
        )
    return tokenizer


__all__ = ["load", "save"]

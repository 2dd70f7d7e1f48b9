"""What a checkpoint is, told without running it: sizes, sites, hashes, and what is unusual."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from satlens.checkpoints.files import (
    CONFIG,
    TOKENIZER,
    TRAINING,
    file_sha256,
    has_weights,
    read_json,
    read_weights,
    sha256_of,
    weight_files,
)
from satlens.checkpoints.hub import locate
from satlens.checkpoints.layouts import Layout, layout_of
from satlens.checkpoints.layouts.satformer_repo import recipe_config
from satlens.checkpoints.manifest import verify
from satlens.checkpoints.unusual import unusual_config, unusual_vocabulary, unusual_weights
from satlens.config import ModelConfig, to_dict
from satlens.data.tokenizers import fingerprint, load_tokenizer, vocab_size
from satlens.models.decoder import Decoder, model_sites
from satlens.models.initialise import family


def inspect(path: str | Path, value_residual: str | None = None) -> dict[str, Any]:
    """Facts about a checkpoint in any supported layout, or about a configuration alone.

    Args:
        path: a checkpoint folder (its weights may be missing), a ``config.json``, a recipe of the
            SATFormer repository (``configs/{model}/{size}.json``), a zoo name or a hub id.
        value_residual: as in :func:`satlens.load`.

    Returns:
        checkpoint, layout, architecture, model (the configuration), parameters (total and by
        family), sites, weights (files, tensors by dtype; None without any), sha256 (of the whole
        as in a result's provenance, and by file), tokenizer, training, and unusual: sentences.

    Raises:
        CheckpointError: unreadable, damaged, unsafe, incomplete or in no known layout.
        ConfigError: a configuration that cannot be built, naming the fields.
    """
    config_file = Path(path)
    alone = config_file.is_file()
    folder = config_file.parent if alone else locate(path)
    config_file = config_file if alone else folder / CONFIG
    config = read_json(config_file)
    config = (recipe_config(config) or config) if alone else config
    layout = layout_of(config, str(config_file), value_residual)
    cfg = layout.model_config(config, str(config_file), value_residual)
    facts: dict[str, Any] = {
        "checkpoint": Path(path).resolve().name if Path(path).exists() else str(path),
        "layout": layout.name,
        "architecture": cfg.variant,
        "model": to_dict(cfg),
        "parameters": _parameters(cfg),
        "sites": _sites(cfg),
        "weights": None,
        "sha256": {config_file.name: file_sha256(config_file)},
        "tokenizer": None,
        "training": None,
    }
    unusual = list(unusual_config(cfg, layout.name))
    if alone or not has_weights(folder):
        unusual.insert(0, f"no weights {'read' if alone else 'there'}: the configuration alone")
    else:
        unusual += _read_folder(facts, folder, layout, cfg)
    return {**facts, "unusual": unusual}


def _read_folder(
    facts: dict[str, Any], folder: Path, layout: Layout, cfg: ModelConfig
) -> list[str]:
    """Fill in what weights, tokenizer and training facts tell; what is unusual about them."""
    files = weight_files(folder)
    hashes = verify(folder, files) if layout.has_manifest else {}
    tensors = read_weights(files)
    state = layout.gather(cfg, tensors, str(files[0]))
    dtypes = Counter(str(t.dtype).removeprefix("torch.") for t in tensors.values())
    facts["weights"] = {"files": [f.name for f in files], "tensors": dict(sorted(dtypes.items()))}
    measured = [folder / CONFIG, *files]
    by_file = {f.name: hashes.get(f.name) or file_sha256(f) for f in measured}
    facts["sha256"] = {"checkpoint": sha256_of(measured, by_file), **by_file}
    n_tokens = None
    if (folder / TOKENIZER).exists():
        tokenizer = load_tokenizer(folder / TOKENIZER)
        n_tokens = vocab_size(tokenizer)
        facts["tokenizer"] = {"tokens": n_tokens, "fingerprint": fingerprint(tokenizer)}
    if layout.has_manifest and (folder / TRAINING).exists():
        facts["training"] = read_json(folder / TRAINING)
    return [*unusual_weights(cfg, state, tensors), *unusual_vocabulary(cfg, n_tokens)]


def _parameters(cfg: ModelConfig) -> dict[str, int]:
    """Numbers of parameters, tied ones once."""
    with torch.device("meta"):
        model = Decoder(cfg, seed=None)
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        counts[family(name)] += parameter.numel()
    return {"total": model.n_parameters(), **dict(counts.most_common())}


def _sites(cfg: ModelConfig) -> dict[str, Any]:
    sites = model_sites(cfg)
    kinds = Counter(site.kind for site in sites)
    return {"gates": kinds["gate"], "routes": kinds["route"], "names": [s.name for s in sites]}


def summary(facts: Mapping[str, Any]) -> str:
    """The same for a reader, a fact a line."""
    model, total = facts["model"], facts["parameters"]["total"]
    families = ", ".join(f"{n} {c:,}" for n, c in facts["parameters"].items() if n != "total")
    d_mlp = model["d_mlp"]
    mlp = d_mlp if isinstance(d_mlp, int) else f"{min(d_mlp)} to {max(d_mlp)}"
    sites = facts["sites"]
    lines = {
        "checkpoint": facts["checkpoint"],
        "layout": facts["layout"],
        "architecture": facts["architecture"],
        "value residual": _options(model["value_residual"]),
        "stream": _options(model["stream"]),
        "sizes": f"{model['n_layers']} layers of {model['d_model']}, {model['n_heads']} heads of "
        f"{model['d_head']} ({model['n_key_value_heads']} KV), MLP {mlp}, vocabulary "
        f"{model['d_vocab']:,}, context {model['n_ctx']:,}",
        "parameters": f"{total:,} ({families})",
        "sites": f"{sites['gates']} gates, {sites['routes']} routes",
    }
    weights, tokenizer = facts["weights"], facts["tokenizer"]
    if weights:
        dtypes = ", ".join(f"{count} {name}" for name, count in weights["tensors"].items())
        lines["weights"] = f"{', '.join(weights['files'])} ({dtypes} tensors)"
    lines |= {f"sha256 {name}": value for name, value in facts["sha256"].items()}
    if tokenizer:
        lines["tokenizer"] = f"{tokenizer['tokens']:,} tokens, {tokenizer['fingerprint']}"
    if facts["training"]:
        lines["training"] = _options(facts["training"])
    lines |= {f"unusual {i}": sentence for i, sentence in enumerate(facts["unusual"], 1)}
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _options(values: Mapping[str, Any]) -> str:
    """``kind: field=value, ...`` of a part of the configuration; plain facts without a kind."""
    kind = values.get("kind")
    fields = [f"{k}={v}" for k, v in values.items() if k != "kind" and not isinstance(v, dict)]
    return ": ".join(part for part in (kind, ", ".join(fields)) if part)

"""Names of architectures and of whole models. Imports no torch.

A *variant* is an architecture at the tiny scale, to be resized by keywords; a *preset* is a model
of a stated size. ``satlens.build`` takes either.
"""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any, Literal

from satlens.config import (
    AttnResStream,
    DeltaStream,
    DenseStream,
    GatedValueResidual,
    HyperStream,
    ModelConfig,
    MuddStream,
    NoValueResidual,
    ResidualStream,
    RoleDecoupledStream,
    StaticValueResidual,
    make,
    to_dict,
)
from satlens.errors import ConfigError

# -- architectures ---------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "transformer": {},
    "resformer": {"value_residual": StaticValueResidual()},
    "resformer-identity": {"value_residual": StaticValueResidual(mode="identity")},
    "resformer-learnable": {"value_residual": StaticValueResidual(mode="learnable")},
    "satformer": {"value_residual": GatedValueResidual()},
    "attnres": {"stream": AttnResStream()},
    "attnres-full": {"stream": AttnResStream(block_size=1)},
    "rd-attnres": {"stream": RoleDecoupledStream()},
    "rd-attnres-tied": {"stream": RoleDecoupledStream(control="tied")},
    "rd-attnres-average": {"stream": RoleDecoupledStream(control="average")},
    "rd-attnres-frozen-v": {"stream": RoleDecoupledStream(control="frozen_v")},
    "hyperconnections": {"stream": HyperStream()},
    "hyperconnections-static": {"stream": HyperStream(dynamic=False)},
    "denseformer": {"stream": DenseStream()},
    "muddformer": {"stream": MuddStream()},
    "muddformer-prepost": {"stream": MuddStream(pre_post_norm=True)},
    "delta-attnres": {"stream": DeltaStream()},
    "delta-attnres-full": {"stream": DeltaStream(block_size=1)},
}

# -- sizes -----------------------------------------------------------------------------------------

# SATFormer repository: head width 64, no GQA, qk-norm, tied, Llama-2's vocabulary.
_SATFORMER_SCALES = {
    "small": (768, 11, 12, 3072),
    "medium": (1024, 18, 16, 4096),
    "large": (1536, 19, 24, 6144),
    "xl": (2048, 24, 32, 5632),
}
# RD-AttnRes paper (arXiv 2608.01075): FFN 5 d, tied, blocks of 4 layers.
_RD_SCALES = {"s": (576, 16, 36), "m": (832, 24, 52)}


def _satformer_scale(size: str, variant: str) -> dict[str, Any]:
    d_model, n_layers, n_heads, d_mlp = _SATFORMER_SCALES[size]
    return {
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "d_mlp": d_mlp,
        "d_vocab": 32_000,
        "n_ctx": 4096,
        "qk_norm": True,
        "tied_embeddings": True,
        "document_mask": False,
        "init": "normal_0.02",
        **VARIANTS[variant],
    }


def _muddformer_scale(size: str) -> dict[str, Any]:
    """As in the SATFormer repository: PrePostDANorm and MLPs that widen with depth."""
    fields_ = _satformer_scale(size, "muddformer-prepost")
    return {**fields_, "d_mlp": reallocated_widths(fields_["d_mlp"], fields_["n_layers"])}


def _rd_scale(size: str, stream: Any) -> dict[str, Any]:
    d_model, n_layers, n_heads = _RD_SCALES[size]
    return {
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "d_mlp": 5 * d_model,
        "d_vocab": 32_768,
        "n_ctx": 1024,
        "tied_embeddings": True,
        "document_mask": False,
        "init": "normal_0.02",
        "stream": stream,
    }


def reallocated_widths(
    d_mlp: int, n_layers: int, form: Literal["satformer_repo", "release"] = "satformer_repo"
) -> int | tuple[int, ...]:
    """MLP widths of MUDDFormer, growing with depth from half of ``d_mlp`` to three halves.

    Args:
        d_mlp: I, the width they average to.
        n_layers: L; one layer keeps ``d_mlp``.
        form: ``satformer_repo`` rounds to multiples of 256, at least 256; ``release`` to multiples
            of 128, 0 included. Both round I f_i, f_i = (0.5 (L - i) + 1.5 (i - 1)) / (L - 1),
            ties to even (arXiv 2502.12170).
    """
    if n_layers == 1:
        return d_mlp
    shares = [
        (0.5 * (n_layers - i) + 1.5 * (i - 1)) / (n_layers - 1) for i in range(1, n_layers + 1)
    ]
    if form == "release":
        return tuple(128 * round(d_mlp * share / 128) for share in shares)
    return tuple(max(256, (round(d_mlp * share) + 127) // 256 * 256) for share in shares)


def _presets() -> dict[str, dict[str, Any]]:
    presets = {f"tiny-{name}": {**fields_} for name, fields_ in VARIANTS.items()}
    for size in _SATFORMER_SCALES:
        for variant in ("transformer", "resformer", "satformer"):
            presets[f"{variant}-{size}"] = _satformer_scale(size, variant)
    for size in ("small", "medium", "large"):
        presets[f"denseformer-{size}"] = _satformer_scale(size, "denseformer")
        presets[f"muddformer-{size}"] = _muddformer_scale(size)
        presets[f"hyperconnections-{size}"] = _satformer_scale(size, "hyperconnections")
    for size in _RD_SCALES:
        presets[f"attnres-{size}"] = _rd_scale(size, AttnResStream(block_size=8))
        for control in ("none", "tied", "average", "frozen_v"):
            suffix = "" if control == "none" else f"-{control.replace('_', '-')}"
            stream = RoleDecoupledStream(block_size=8, control=control)
            presets[f"rd-attnres{suffix}-{size}"] = _rd_scale(size, stream)
    return presets


PRESETS = _presets()
"""``tiny-*`` for CPUs; ``{transformer,resformer,satformer}-{small,medium,large,xl}``,
``{denseformer,muddformer,hyperconnections}-{small,medium,large}`` and
``{attnres,rd-attnres}-{s,m}`` at the papers' scales."""


def config_for(name: str, **changes: Any) -> ModelConfig:
    """The configuration of a variant or preset, with fields changed by keyword.

    Fields of the value residual and of the stream may be given flat (``gate="tanh"``,
    ``block_size=2``, ``control="tied"``) or dotted (``stream.block_size``). ``value_residual`` and
    ``stream`` also accept the name of a variant to take that part from, so that they compose:
    ``config_for("rd-attnres", value_residual="satformer")``.

    Raises:
        ConfigError: unknown name or field (with the nearest known one), impossible value.
    """
    key = name.replace("_", "-")
    base = VARIANTS.get(key, PRESETS.get(key))
    if base is None:
        near = difflib.get_close_matches(key, [*VARIANTS, *PRESETS], n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"{name}: no such variant or preset{hint}")
    values: dict[str, Any] = {
        k: v if isinstance(v, int | float | str | tuple) else to_dict(v) for k, v in base.items()
    }
    return make(ModelConfig, _changed(values, changes), name)


def change(cfg: ModelConfig, changes: dict[str, Any], where: str) -> ModelConfig:
    """A configuration with fields changed as in :func:`config_for`; derived widths stay.

    Raises:
        ConfigError: as :func:`config_for`.
    """
    return make(ModelConfig, _changed(to_dict(cfg), changes), where)


def _changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    changes = dict(changes)
    for part, default in (("value_residual", NoValueResidual()), ("stream", ResidualStream())):
        given = changes.pop(part, None)
        if isinstance(given, str):
            donor = VARIANTS.get(given.replace("_", "-"), {}).get(part)
            if donor is None:
                raise ConfigError(f"{part}: no variant {given!r} that has one")
            given = donor
        if given is not None:
            values[part] = given if isinstance(given, dict) else to_dict(given)
        values.setdefault(part, to_dict(default))
    own = {f.name for f in fields(ModelConfig)}
    for field, value in changes.items():
        if field in own:
            values[field] = value
            continue
        part, dot, inner = field.partition(".")
        if dot and part in ("value_residual", "stream"):
            values[part][inner] = value
            continue
        homes = [part for part in ("value_residual", "stream") if field in values[part]]
        target = values[homes[0]] if homes and field != "kind" else values
        target[field] = value
    return values

"""The configuration of a satlens model as transformers reads and writes it."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from satlens.checkpoints.files import CONFIG
from satlens.checkpoints.layouts.native import FORMAT, VERSION, Native
from satlens.config import ModelConfig, make, to_dict
from satlens.errors import CheckpointError


class SatlensConfig(PreTrainedConfig):
    """``config.json`` of a satlens checkpoint, as transformers reads and writes it.

    ``model`` holds the fields of :class:`satlens.ModelConfig`; the names that transformers' tools
    ask for (``hidden_size``, ``vocab_size``, ...) are read from it and cannot be set apart.

    Raises:
        ConfigError: a field of ``model`` that is unknown or impossible.
    """

    model_type = "satlens"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]

    format: str = FORMAT
    version: int = VERSION
    model: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        known = {"format": self.format, "version": self.version, "model": self.model}
        if self.model is None:
            known["model"] = {}
        if not Native().matches(known):
            raise CheckpointError(f"{CONFIG}: format: expected {FORMAT!r}, found {self.format!r}")
        # As JSON gives it back (lists for tuples), so that equal configurations compare equal.
        cfg = Native().model_config(known, CONFIG)
        self.model = json.loads(json.dumps(to_dict(cfg)))
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, cfg: ModelConfig) -> SatlensConfig:
        """The configuration of a satlens model."""
        return cls(model=to_dict(cfg))

    def to_satlens(self) -> ModelConfig:
        """The satlens configuration that ``model`` holds."""
        assert self.model is not None
        return make(ModelConfig, self.model, f"{CONFIG}: model")

    @property
    def vocab_size(self) -> int:
        return self.to_satlens().d_vocab

    @property
    def hidden_size(self) -> int:
        return self.to_satlens().d_model

    @property
    def intermediate_size(self) -> int | tuple[int, ...]:
        return self.to_satlens().d_mlp

    @property
    def num_hidden_layers(self) -> int:
        return self.to_satlens().n_layers

    @property
    def num_attention_heads(self) -> int:
        return self.to_satlens().n_heads

    @property
    def num_key_value_heads(self) -> int:
        return self.to_satlens().n_key_value_heads

    @property
    def head_dim(self) -> int:
        return self.to_satlens().d_head

    @property
    def max_position_embeddings(self) -> int:
        return self.to_satlens().n_ctx

    @property
    def tie_word_embeddings(self) -> bool:
        return self.to_satlens().tied_embeddings

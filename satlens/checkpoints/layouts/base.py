"""What a layout is: a reading of its ``config.json`` and a table of tensor names."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from satlens.config import ModelConfig
from satlens.errors import CheckpointError, ConfigError


class Rule(NamedTuple):
    """One of our tensors and the tensors it is made of in another layout.

    Theirs, stacked along the first axis and reshaped, are ours: rows of a fused matrix, or
    vectors that we keep as rows of one matrix.
    """

    ours: str
    shape: tuple[int, ...]
    """Shape of ours."""
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each of theirs."""

    def join(self, tensors: dict[str, Tensor]) -> Tensor:
        """Theirs -> ours."""
        parts = [tensors[name] for name, _ in self.parts]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(self.shape)

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Ours -> theirs."""
        if len(self.parts) == 1:
            name, shape = self.parts[0]
            return {name: tensor.reshape(shape)}
        rows = tensor.reshape(-1, *self.parts[0][1][1:])
        pieces = rows.split([shape[0] for _, shape in self.parts])
        return {name: piece for (name, _), piece in zip(self.parts, pieces, strict=True)}


class Layout(ABC):
    """A published way to lay out a checkpoint folder."""

    name: ClassVar[str]
    writable: ClassVar[bool] = True
    has_manifest: ClassVar[bool] = False
    """Whether ``manifest.json`` and ``training.json`` belong to it."""
    ignored: ClassVar[str | None] = None
    """Pattern of tensors that old files carry and that follow from the config."""

    @abstractmethod
    def matches(self, config: dict[str, Any], value_residual: str | None = None) -> bool:
        """Whether a ``config.json`` is in this layout, given what the caller said of it."""

    @abstractmethod
    def model_config(
        self, config: dict[str, Any], where: str, value_residual: str | None = None
    ) -> ModelConfig:
        """Their configuration -> ours.

        Raises:
            ConfigError: one that cannot be built or that satlens does not express.
        """

    @abstractmethod
    def config_of(self, cfg: ModelConfig) -> dict[str, Any]:
        """Our configuration -> theirs.

        Raises:
            ConfigError: a field the layout has no place for.
        """

    @abstractmethod
    def rules(self, cfg: ModelConfig) -> list[Rule]:
        """Every tensor of a model, in ours and in their names."""

    def tied_copy(self, cfg: ModelConfig) -> tuple[str, str] | None:
        """A tensor that a tied checkpoint may repeat, and the one it must equal."""
        return None

    def zeros(self, cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Their tensors that have no counterpart here and do nothing while they are zero."""
        return {}

    def modernised(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Their tensors under the names that :meth:`rules` gives, where older files have others."""
        return tensors

    # -- what follows from the above ----------------------------------------------------------

    def write(
        self, cfg: ModelConfig, state: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Our configuration and weights -> theirs."""
        config = self.config_of(cfg)
        theirs: dict[str, Tensor] = {}
        for rule in self.rules(cfg):
            theirs.update(rule.split(state[rule.ours]))
        dtype = state["embed.weight"].dtype
        for name, shape in self.zeros(cfg).items():
            theirs[name] = torch.zeros(shape, dtype=dtype)
        return config, theirs

    def gather(self, cfg: ModelConfig, tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
        """Their tensors -> our state dict, every one accounted for.

        Raises:
            CheckpointError: missing, extra or misshaped tensors, or such that have no counterpart
                here without being zero, by name.
        """
        tensors = self.modernised(tensors)
        rules, zeros = self.rules(cfg), self.zeros(cfg)
        expected = dict(part for rule in rules for part in rule.parts) | zeros
        missing = [name for name in expected if name not in tensors]
        if missing:
            raise CheckpointError(f"{where}: missing tensors: {_listed(missing)}")
        extra = [name for name in tensors if name not in expected]
        extra = [n for n in extra if not (self.ignored and re.fullmatch(self.ignored, n))]
        copy = self.tied_copy(cfg)
        if copy and copy[0] in extra:
            if not torch.equal(tensors[copy[0]], tensors[copy[1]]):
                raise CheckpointError(f"{where}: tied, but {copy[0]} differs from {copy[1]}")
            extra.remove(copy[0])
        if extra:
            raise CheckpointError(f"{where}: tensors this model does not have: {_listed(extra)}")
        for name, shape in expected.items():
            if tuple(tensors[name].shape) != shape:
                found = [*tensors[name].shape]
                raise CheckpointError(
                    f"{where}: tensor {name} has shape {found}, config.json asks for {[*shape]}"
                )
        for name in zeros:
            if tensors[name].any():
                raise CheckpointError(
                    f"{where}: tensor {name} must be zero: satlens has no such part"
                )
        return {rule.ours: rule.join(tensors) for rule in rules}


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def only(config: dict[str, Any], key: str, allowed: tuple[Any, ...], where: str) -> None:
    """Refuse a key whose value would change what the model computes.

    Raises:
        ConfigError: present with another value.
    """
    if key in config and config[key] not in allowed:
        raise ConfigError(f"{where}: {key}: {config[key]!r} is not supported")


def no_value_residual(value_residual: str | None, layout: str) -> None:
    """Refuse the loader's argument where the files themselves say what the model is.

    Raises:
        ConfigError: it was given.
    """
    if value_residual is not None:
        raise ConfigError(f"value_residual: the {layout} layout states it itself; leave it out")

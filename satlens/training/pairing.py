"""Paired runs: arms that share everything but what is compared.

One seed gives all arms the same initial value of every shared parameter (each is drawn from the
seed and its own name), the same data order (a function of seed and step) and the same evaluation
tokens. What is left to check is that the arms differ in nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from satlens.config import ModelConfig, TrainConfig, to_dict
from satlens.errors import ConfigError
from satlens.training.run_folder import differences, read_run

ARCHITECTURE = ("value_residual", "stream")
"""Fields in which arms may differ without being asked."""


def check_paired(
    arms: Mapping[str, tuple[ModelConfig, TrainConfig]],
    *,
    differ: Iterable[str] = ARCHITECTURE,
) -> None:
    """Refuse arms that differ elsewhere than declared.

    Args:
        arms: configs by name; all are compared with the first.
        differ: fields of ModelConfig or TrainConfig that may differ.

    Raises:
        ConfigError: names the arm, the field and both values; or an unknown field in ``differ``.
    """
    records = {
        name: {"model": to_dict(model), "train": to_dict(train)}
        for name, (model, train) in arms.items()
    }
    _check(records, differ)


def check_paired_runs(
    folders: Mapping[str, str | Path], *, differ: Iterable[str] = ARCHITECTURE
) -> None:
    """The same for trained runs, from their run.json: data, evaluation tokens and device too.

    Raises:
        ConfigError: as :func:`check_paired`.
        CheckpointError: a folder without a readable run.json.
    """
    _check({name: read_run(folder) for name, folder in folders.items()}, differ)


def _check(records: Mapping[str, dict[str, Any]], differ: Iterable[str]) -> None:
    declared = tuple(differ)
    known = [f.name for f in (*fields(ModelConfig), *fields(TrainConfig))]
    for field in declared:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"differ: unknown field {field!r}{hint}")
    (first, reference), *others = records.items()
    for name, record in others:
        for field, wanted, found in differences(reference, record):
            if field.split(".")[1:2] and field.split(".")[1] in declared:
                continue
            raise ConfigError(
                f"{name}: {field}: {found!r}, but {first} has {wanted!r}; paired arms may differ "
                f"only in {', '.join(declared)}"
            )

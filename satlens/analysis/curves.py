"""Losses logged while training: curves of runs, and paired differences of arms along the way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from satlens.analysis.engine.inputs import interval_columns
from satlens.analysis.result import Result
from satlens.analysis.stats import student_interval
from satlens.errors import AnalysisError, CheckpointError
from satlens.provenance import provenance
from satlens.training.run_folder import RunFolder, read_run

PathLike = str | Path

MILESTONES = 10
"""Evaluations along training at which arms are compared, the last one among them."""


def by_seed(arm: str, folders: Sequence[PathLike]) -> dict[int, Path]:
    """The run folders of an arm by their training seed, in order of the seeds."""
    found: dict[int, Path] = {}
    for folder in map(Path, folders):
        number = int(read_run(folder)["train"]["seed"])
        if number in found:
            raise AnalysisError(f"{arm}: {found[number]} and {folder} share seed {number}")
        found[number] = folder
    return dict(sorted(found.items()))


def curves(runs: Mapping[str, Sequence[PathLike]], *, reference: str | None = None) -> Result:
    """Validation losses while training, from the logs of the runs.

    Args:
        runs: arm -> its run folders, one a seed.
        reference: arm that a figure takes differences from; None is the first.

    Returns:
        ``curves``: a row an evaluation with ``arm, seed, step, tokens, val_loss``.

    Raises:
        AnalysisError: no run has logged an evaluation, or two runs of an arm share a seed.
        CheckpointError: a folder without a readable run.json or log.
    """
    rows = []
    for arm, folders in runs.items():
        for number, folder in by_seed(arm, folders).items():
            for line in _evaluations(RunFolder(folder).metrics):
                kept = {key: line[key] for key in ("step", "tokens", "val_loss")}
                rows.append({"arm": arm, "seed": number, **kept})
    if not rows:
        raise AnalysisError("curves: no run has logged a validation loss")
    first = next(iter(runs))
    table = pd.DataFrame(rows).assign(n_documents=None, n_tokens=None, flags="")
    source = provenance(
        checkpoint=None,
        data={"split": "val, the runs' own evaluation slice"},
        tokenizer=None,
        seed=None,
        n_documents=0,
        n_tokens=0,
    )
    return Result(
        "curves",
        table,
        source,
        {"reference": first if reference is None else reference},
        ["Validation losses as logged while training."],
        keys=("seed", "step", "tokens"),
    )


def differences_in_training(
    pairs: Sequence[tuple[str, str]], folders: Mapping[str, Mapping[int, Path]]
) -> Result | None:
    """Paired differences in validation loss at up to ten evaluations of every contrast.

    Args:
        pairs: (first, second) arms, first minus second.
        folders: arm -> seed -> run folder.

    Returns:
        ``comparison_milestones``: a row a contrast and ``tokens`` seen, with the t interval over
        seeds; None where the logs of two arms share no evaluation.
    """
    rows = []
    for first, second in pairs:
        shared = [seed for seed in folders[first] if seed in folders[second]]
        mine, theirs = ([_logged(folders[arm][seed]) for seed in shared] for arm in (first, second))
        common = sorted(set.intersection(*(set(losses) for losses in (*mine, *theirs))))
        at = np.unique(np.linspace(0, len(common) - 1, MILESTONES).round().astype(int))
        for tokens in (common[i] for i in at if common):
            changes = [a[tokens] - b[tokens] for a, b in zip(mine, theirs, strict=True)]
            found = student_interval(np.array(changes))
            columns = interval_columns("difference", found)
            rows.append(
                {
                    "first": first,
                    "second": second,
                    "tokens": tokens,
                    **{name: float(value[0]) for name, value in columns.items()},
                    "n_seeds": len(shared),
                    "n_documents": None,
                    "n_tokens": None,
                    "flags": str(found.flags),
                }
            )
    if not rows:
        return None
    notes = [
        "Differences in validation loss as logged while training, with t intervals over seeds."
    ]
    return Result("comparison_milestones", pd.DataFrame(rows), notes=notes, keys=("tokens",))


def _logged(folder: Path) -> dict[int, float]:
    """Tokens seen -> validation loss."""
    return {line["tokens"]: line["val_loss"] for line in _evaluations(RunFolder(folder).metrics)}


def _evaluations(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        records = [json.loads(line) for line in lines]
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON lines ({error})") from None
    return [record for record in records if "val_loss" in record]

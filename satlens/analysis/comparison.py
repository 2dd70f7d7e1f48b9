"""Trained arms against each other over paired seeds.

Runs of one seed share their initial weights where they have them in common, their data order and
their evaluation tokens; what is compared is the loss of their final checkpoints on the same
windows. Arms that differ in more than the declared fields are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from satlens.analysis.evaluation import document_losses, grouped
from satlens.analysis.inputs import (
    interval_columns,
    open_windows,
    opened,
    split_notes,
    tokenizer_of,
    window_facts,
)
from satlens.analysis.result import Result
from satlens.analysis.stats import MIN_SEEDS, N_RESAMPLES, mean_interval, seed_comparison
from satlens.analysis.stream import Progress
from satlens.checkpoints import load
from satlens.data.tokenizers import fingerprint
from satlens.errors import AnalysisError, CheckpointError
from satlens.models.attention import chosen_attention
from satlens.provenance import provenance
from satlens.training.pairing import ARCHITECTURE, check_paired_runs
from satlens.training.run_folder import RunFolder, read_run

NOISE_FLOOR = 0.01
"""Nats a token by which two runs at the demo scale are taken to differ for no reason: in a
similar recipe on other text, changing the learning rate by a thousandth moved the loss by
about as much."""

PathLike = str | Path


class Losses(NamedTuple):
    """What one run's final checkpoint scored."""

    nll: np.ndarray
    """Summed by document, (n_documents,)."""
    n: np.ndarray
    """Scored tokens by document."""
    sha256: str | None
    """Of the checkpoint."""


def compare(
    runs: Mapping[str, Sequence[PathLike]],
    data: Any,
    *,
    baseline: str | None = None,
    contrasts: Sequence[tuple[str, str]] | None = None,
    allow: Sequence[str] = (),
    split: str = "test",
    device: str = "cpu",
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
    resume_dir: PathLike | None = None,
) -> Result:
    """Paired differences in held-out loss between arms, first minus second, in nats a token.

    Args:
        runs: arm -> its run folders, one a seed.
        data: what the final checkpoints are scored on.
        baseline: arm that the others are compared with; None is the first.
        contrasts: (first, second) pairs of arms instead of everything against the baseline.
        allow: configuration fields, beside ``value_residual`` and ``stream``, in which arms may
            differ.
        split: of prepared data.
        n_resamples, seed: of the bootstraps.
        resume_dir: where a killed comparison continues from.

    Returns:
        ``comparison``: a row a contrast with the mean ``difference`` and its t interval over
        seeds, bootstrap intervals from five seeds on, a sign test, ``seed_<k>`` and, for these
        checkpoints on other documents, ``difference_documents``.

    Raises:
        AnalysisError: unknown arms, no common seed, two runs of one seed.
        ConfigError: arms that differ in a field that is not declared.
        CheckpointError: a run folder that is unfinished or damaged.
    """
    pairs = _contrasts(runs, baseline, contrasts)
    arms = list(dict.fromkeys(name for pair in pairs for name in pair))
    folders = {arm: _by_seed(arm, runs[arm]) for arm in arms}
    _check(folders, allow)
    data = opened(data)
    windows, losses = None, {}
    tokenizer = None
    for arm, seeds in folders.items():
        for number, folder in seeds.items():
            model = load(_final(folder), device=device)
            windows = open_windows(
                model,
                data,
                split=split,
                batch_size=batch_size,
                max_documents=max_documents,
                max_tokens_per_document=max_tokens_per_document,
            )
            tokenizer = tokenizer_of(model, data)
            sums = document_losses(model, windows, progress=progress, resume_dir=resume_dir)
            losses[arm, number] = Losses(*sums, model.provenance.get("sha256"))
    assert windows is not None
    rows = [_row(pair, folders, losses, n_resamples, seed) for pair in pairs]
    n_seeds = {
        f"{first} - {second}": int(row["n_seeds"])
        for (first, second), row in zip(pairs, rows, strict=True)
    }
    source = provenance(
        checkpoint={
            "runs": {f"{arm}, seed {k}": found.sha256 for (arm, k), found in losses.items()}
        },
        data=window_facts(windows),
        tokenizer=None if tokenizer is None else fingerprint(tokenizer),
        seed=seed,
        n_documents=windows.n_documents,
        n_tokens=windows.n_tokens,
        attention=chosen_attention(),
    )
    summary = {
        "reference": pairs[0][1],
        "arms": arms,
        "n_seeds": n_seeds,
        "noise_floor": NOISE_FLOOR,
        "nll": {arm: {str(k): _mean(losses[arm, k]) for k in folders[arm]} for arm in arms},
        "declared": [*ARCHITECTURE, *allow],
        "interval": "Student t over seeds (other seeds); difference_documents: bootstrap over "
        "documents (these checkpoints, other documents)",
    }
    return Result(
        "comparison", pd.DataFrame(rows), source, summary, [*_NOTES, *split_notes(windows)]
    )


_NOTES = (
    "Runs of one seed share initial weights, data order and evaluation tokens; differences are "
    "first minus second, in nats a token.",
    f"Below {MIN_SEEDS} seeds there is a t interval and no bootstrap; sign_p_min is the smallest p "
    "that so few seeds can reach.",
    f"Differences below about {NOISE_FLOOR} nats are taken as the noise of single runs at the demo "
    "scale; that was measured with a similar recipe on other text.",
)


# -- which runs ------------------------------------------------------------------------------------


def _contrasts(
    runs: Mapping[str, Sequence[PathLike]],
    baseline: str | None,
    contrasts: Sequence[tuple[str, str]] | None,
) -> list[tuple[str, str]]:
    if contrasts is None:
        reference = next(iter(runs), None) if baseline is None else baseline
        pairs = [(arm, str(reference)) for arm in runs if arm != reference]
    else:
        pairs = [(first, second) for first, second in contrasts]
    for name in (name for pair in pairs for name in pair):
        if name not in runs:
            raise AnalysisError(f"compare: no arm {name!r}; there are {', '.join(runs)}")
    if not pairs:
        raise AnalysisError("compare: two arms are needed")
    return pairs


def _by_seed(arm: str, folders: Sequence[PathLike]) -> dict[int, Path]:
    """The run folders of an arm by their training seed, in order of the seeds."""
    found: dict[int, Path] = {}
    for folder in map(Path, folders):
        number = int(read_run(folder)["train"]["seed"])
        if number in found:
            raise AnalysisError(f"compare: {arm}: {found[number]} and {folder} share seed {number}")
        found[number] = folder
    return dict(sorted(found.items()))


def _check(folders: Mapping[str, Mapping[int, Path]], allow: Sequence[str]) -> None:
    """Arms of a seed may differ in what is declared, seeds of an arm in the seed alone."""
    for arm, seeds in folders.items():
        check_paired_runs({f"{arm}, seed {k}": f for k, f in seeds.items()}, differ=("seed",))
    for number in sorted({k for seeds in folders.values() for k in seeds}):
        arms = {arm: seeds[number] for arm, seeds in folders.items() if number in seeds}
        check_paired_runs(arms, differ=(*ARCHITECTURE, *allow))


def _final(folder: Path) -> Path:
    final = RunFolder(folder).final
    if not final.is_dir():
        raise CheckpointError(f"{folder}: final: this run is not finished")
    return final


# -- the table -------------------------------------------------------------------------------------


def _mean(found: Losses) -> float:
    return float(found.nll.sum() / found.n.sum())


def _row(
    pair: tuple[str, str],
    folders: Mapping[str, Mapping[int, Path]],
    losses: Mapping[tuple[str, int], Losses],
    n_resamples: int,
    seed: int,
) -> dict[str, Any]:
    first, second = pair
    shared = [number for number in folders[first] if number in folders[second]]
    if not shared:
        raise AnalysisError(f"compare: {first} and {second} have no seed in common")
    mine, theirs = (np.array([_mean(losses[arm, k]) for k in shared]) for arm in pair)
    found = seed_comparison(mine, theirs, n_resamples=n_resamples, seed=seed)
    changes = [losses[first, k].nll - losses[second, k].nll for k in shared]
    n = losses[first, shared[0]].n
    documents = mean_interval(
        grouped(np.mean(changes, axis=0)), grouped(n), n_resamples=n_resamples, seed=seed
    )
    columns: dict[str, Any] = interval_columns("difference", found.t)
    columns |= interval_columns("difference_percentile", found.percentile)
    columns |= interval_columns("difference_bca", found.bca)
    columns |= interval_columns("difference_documents", documents)
    flags = [f"seeds<{MIN_SEEDS}"] if len(shared) < MIN_SEEDS else []
    if abs(float(found.differences.mean())) < NOISE_FLOOR:
        flags.append("below_noise_floor")
    return {
        "first": first,
        "second": second,
        **{name: float(value[0]) for name, value in columns.items()},
        **{f"seed_{k}": float(d) for k, d in zip(shared, found.differences, strict=True)},
        "nll_first": float(mine.mean()),
        "nll_second": float(theirs.mean()),
        "wins": int((found.differences < 0).sum()),
        "n_seeds": len(shared),
        "sign_p": float(found.sign_p),
        "sign_p_min": found.sign_p_min,
        "n_documents": int((n > 0).sum()),
        "n_tokens": int(n.sum()),
        "flags": ";".join(flags),
    }


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
        for number, folder in _by_seed(arm, folders).items():
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


def _evaluations(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        records = [json.loads(line) for line in lines]
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON lines ({error})") from None
    return [record for record in records if "val_loss" in record]

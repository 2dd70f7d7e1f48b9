"""Analyses along training: the tables of every checkpoint that a run kept, stacked.

A run keeps checkpoints at its milestones (``train.milestones``, in training tokens) and its last
one; the untrained model is drawn from the run's seed where it was not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from satlens.analysis.analyze import Settings, analyze
from satlens.analysis.engine.inputs import initial_model, opened
from satlens.analysis.engine.stream import Progress
from satlens.analysis.result import Result
from satlens.analysis.stats import N_RESAMPLES
from satlens.checkpoints import load
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.processes import own_device
from satlens.training.run_folder import RunFolder, read_run

KEY = "tokens_seen"
PREFIX = "trajectory_"
"""Of the names of stacked tables, beside the name of the analysis."""

_NOTE = (
    "A row is a row of the analysis at one checkpoint; tokens_seen are training tokens, 0 is the "
    "untrained model."
)


class Measured(NamedTuple):
    """The results of one checkpoint."""

    tokens: int
    """Training tokens that it had seen."""
    results: dict[str, Result]


def trajectory(
    run: str | Path,
    data: Any,
    analyses: Sequence[str] | None = None,
    *,
    options: Settings | None = None,
    split: str = "test",
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> dict[str, Result]:
    """Analyses of every checkpoint of a run, from the untrained model to the last one.

    A run that still trains gives what it has kept so far.

    Args:
        run: folder that :func:`satlens.train` wrote.
        data, analyses, options, split, batch_size: as of :func:`satlens.analyze`; what an analysis
            says about the first checkpoint decides whether it takes part.
        n_resamples, seed: of bootstraps and sign flips, the same documents at every checkpoint.
        device: where checkpoints are loaded.
        resume_dir: where a killed trajectory continues from.

    Returns:
        Name of the analysis -> ``trajectory_<name>``: its table at each checkpoint, with the key
        ``tokens_seen``; parts likewise. The summary has that of every checkpoint.

    Raises:
        AnalysisError: a run without checkpoints; errors of :func:`satlens.analyze`.
        CheckpointError: no run folder, or a damaged checkpoint.
        DataError: bad data, or data of another tokenizer.
    """
    data = opened(data)
    names, measured = analyses, []
    for tokens, model in _checkpoints(Path(run), own_device(device)):
        results = analyze(
            model,
            data,
            names,
            options=options,
            baseline=False,
            split=split,
            batch_size=batch_size,
            max_documents=max_documents,
            max_tokens_per_document=max_tokens_per_document,
            n_resamples=n_resamples,
            seed=seed,
            progress=_prefixed(progress, tokens),
            resume_dir=resume_dir,
        )
        names = list(results)
        measured.append(Measured(tokens, results))
    return {name: _stacked(name, measured) for name in names or ()}


def _checkpoints(run: Path, device: str) -> Iterator[tuple[int, Decoder]]:
    """Each checkpoint with the tokens it has seen, in their order; the untrained model first.

    Raises:
        AnalysisError: there is none.
        CheckpointError: no run folder, or a damaged checkpoint.
    """
    read_run(run)
    folder = RunFolder(run)
    kept = [path for path in folder.milestones.glob("*") if path.name.isdecimal()]
    places = sorted(kept, key=lambda path: int(path.name))
    places += [folder.final] if folder.final.is_dir() else []
    if not places:
        raise AnalysisError(f"{run}: no milestone and no final checkpoint yet")
    last = -1
    for place in places:
        model = load(place, device=device)
        tokens = int(model.provenance["training"]["tokens"])
        if last < 0 < tokens:
            yield 0, initial_model(model)[0]
        if tokens > last:  # a milestone at the end is the final checkpoint
            yield tokens, model
        last = tokens


def _prefixed(progress: Progress | None, tokens: int) -> Progress | None:
    """Progress that says which checkpoint is measured."""
    if progress is None:
        return None
    return lambda label, done, total: progress(f"{label} at {tokens} tokens", done, total)


def _stacked(name: str, measured: Sequence[Measured]) -> Result:
    """One result of an analysis out of those of all checkpoints."""
    results = {tokens: found[name] for tokens, found in measured}
    last = measured[-1].results[name]
    sources = [
        {KEY: tokens, **result.provenance["checkpoint"]} for tokens, result in results.items()
    ]
    source = {**last.provenance, "milestones": sources}
    parts = tuple(
        _table(part.name, {t: r.part(part.name) for t, r in results.items()}, source)
        for part in last.parts
    )
    summary = {
        KEY: list(results),
        "checkpoints": {str(tokens): result.summary for tokens, result in results.items()},
    }
    return _table(name, results, source, summary, parts)


def _table(
    name: str,
    results: dict[int, Result],
    source: dict[str, Any],
    summary: dict[str, Any] | None = None,
    parts: tuple[Result, ...] = (),
) -> Result:
    last = list(results.values())[-1]
    tables = [result.table.assign(**{KEY: tokens}) for tokens, result in results.items()]
    table = pd.concat(tables, ignore_index=True)
    table.insert(0, KEY, table.pop(KEY))
    return Result(
        PREFIX + name,
        table,
        source,
        {} if summary is None else summary,
        [_NOTE, *last.notes],
        keys=(KEY, *last.keys),
        parts=parts,
    )

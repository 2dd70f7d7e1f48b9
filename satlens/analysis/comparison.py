"""Trained arms against each other over paired seeds.

Runs of one seed share their initial weights where they have them in common, their data order and
their evaluation tokens; what is compared is the loss of their final checkpoints on the same
windows. Arms that differ in more than the declared fields are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from satlens.analysis.curves import by_seed, differences_in_training
from satlens.analysis.engine.inputs import (
    interval_columns,
    interval_protocol,
    open_windows,
    opened,
    split_notes,
    tokenizer_of,
    window_facts,
)
from satlens.analysis.engine.stream import Progress
from satlens.analysis.evaluation import document_losses, grouped
from satlens.analysis.result import Result
from satlens.analysis.statistics.resampling import check_draws
from satlens.analysis.stats import (
    MIN_SEEDS,
    N_RESAMPLES,
    Interval,
    hierarchical_interval,
    mean_interval,
    pool_clusters,
    seed_comparison,
)
from satlens.checkpoints import load
from satlens.data.tokenizers import fingerprint
from satlens.errors import AnalysisError, CheckpointError
from satlens.models.attention import chosen_attention
from satlens.provenance import provenance
from satlens.training.pairing import ARCHITECTURE, check_paired_runs
from satlens.training.run_folder import RunFolder

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
    n_parameters: int


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
        seeds, ``seed_<k>`` and a sign test. The same mean again with other intervals: bootstraps
        over seeds (``difference_percentile``, ``difference_bca``) and over seeds and documents
        (``difference_hierarchical``) from five seeds on; over documents, and over clusters where
        the data has some, for these very checkpoints (``difference_documents``,
        ``difference_clusters``). Part ``comparison_milestones``: along training, from the logs.

    Raises:
        AnalysisError: unknown arms, no common seed, two runs of one seed; no resamples.
        ConfigError: arms that differ in a field that is not declared.
        CheckpointError: a run folder that is unfinished or damaged.
    """
    check_draws(n_resamples, seed)
    pairs = _pairs(runs, baseline, contrasts)
    arms = list(dict.fromkeys(name for pair in pairs for name in pair))
    folders = {arm: by_seed(arm, runs[arm]) for arm in arms}
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
            sha256 = model.provenance.get("sha256")
            losses[arm, number] = Losses(*sums, sha256, model.n_parameters())
    assert windows is not None
    labels = [document.cluster for document in windows.documents]
    compared = [
        _contrast(pair, folders, losses, labels, {"n_resamples": n_resamples, "seed": seed})
        for pair in pairs
    ]
    rows = [contrast.row for contrast in compared]
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
        "n_seeds": {f"{row['first']} - {row['second']}": row["n_seeds"] for row in rows},
        "noise_floor": NOISE_FLOOR,
        "nll": {arm: {str(k): _mean(losses[arm, k]) for k in folders[arm]} for arm in arms},
        "declared": [*ARCHITECTURE, *allow],
        "n_parameters": {
            arm: losses[arm, next(iter(seeds))].n_parameters for arm, seeds in folders.items()
        },
        "intervals": compared[0].protocols,
    }
    milestones = differences_in_training(pairs, folders)
    return Result(
        "comparison",
        pd.DataFrame(rows),
        source,
        summary,
        [*_NOTES, *_row_notes(rows), *split_notes(windows)],
        parts=() if milestones is None else (milestones,),
    )


_NOTES = (
    "Runs of one seed share initial weights, data order and evaluation tokens; differences are "
    "first minus second, in nats a token.",
    "Ends of difference: Student's t over seeds. Of difference_percentile and difference_bca: "
    "bootstraps over seeds, too narrow for few. Of difference_hierarchical: bootstrap over seeds "
    "and documents. Of difference_documents: bootstrap over documents, for these checkpoints.",
    f"Below {MIN_SEEDS} seeds there is a t interval and no bootstrap over seeds; sign_p_min is the "
    "smallest p that so few seeds can reach.",
    f"Differences below about {NOISE_FLOOR} nats are taken as the noise of single runs at the demo "
    "scale; that was measured with a similar recipe on other text.",
)


def _row_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to know about single contrasts: noise, and parameters that are not matched."""
    notes = []
    for row in rows:
        names = f"{row['first']} - {row['second']}"
        if "below_noise_floor" in row["flags"]:
            notes.append(
                f"{names}: {row['difference']:+.4f} nats is below the noise floor of about "
                f"{NOISE_FLOOR} and means nothing by itself."
            )
        extra = row["parameters_first"] / row["parameters_second"] - 1
        if extra:
            notes.append(
                f"{names}: the first has {abs(extra):.2%} {'more' if extra > 0 else 'fewer'} "
                "parameters; a control of equal size is a further arm, with the fields that make "
                "it equal allowed by name."
            )
    return notes


# -- which runs ------------------------------------------------------------------------------------


def _pairs(
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


class Contrast(NamedTuple):
    """One row of the table, and how each of its intervals was made."""

    row: dict[str, Any]
    protocols: dict[str, dict[str, Any]]


def _contrast(
    pair: tuple[str, str],
    folders: Mapping[str, Mapping[int, Path]],
    losses: Mapping[tuple[str, int], Losses],
    labels: Sequence[str | None],
    options: Mapping[str, int],
) -> Contrast:
    first, second = pair
    shared = [number for number in folders[first] if number in folders[second]]
    if not shared:
        raise AnalysisError(f"compare: {first} and {second} have no seed in common")
    mine, theirs = ([losses[arm, k] for k in shared] for arm in pair)
    means = [np.array([_mean(found) for found in arm]) for arm in (mine, theirs)]
    over_seeds = seed_comparison(*means, **options)
    # Every run scores the same tokens, so one count a document is that of all.
    n = mine[0].n
    changes = np.stack([a.nll - b.nll for a, b in zip(mine, theirs, strict=True)])
    by_column = {
        "difference": over_seeds.t,
        "difference_percentile": over_seeds.percentile,
        "difference_bca": over_seeds.bca,
        **_over_documents(changes, n, labels, options),
    }
    columns: dict[str, np.ndarray] = {}
    for name, interval in by_column.items():
        columns |= interval_columns(name, interval)
    differences = over_seeds.differences
    flags = [f"seeds<{MIN_SEEDS}"] if len(shared) < MIN_SEEDS else []
    if abs(float(differences.mean())) < NOISE_FLOOR:
        flags.append("below_noise_floor")
    row = {
        "first": first,
        "second": second,
        **{name: float(value[0]) for name, value in columns.items()},
        **{f"seed_{k}": float(d) for k, d in zip(shared, differences, strict=True)},
        "nll_first": float(means[0].mean()),
        "nll_second": float(means[1].mean()),
        "wins": int((differences < 0).sum()),
        "n_seeds": len(shared),
        "sign_p": float(over_seeds.sign_p),
        "sign_p_min": over_seeds.sign_p_min,
        "parameters_first": mine[0].n_parameters,
        "parameters_second": theirs[0].n_parameters,
        "n_documents": int((n > 0).sum()),
        "n_tokens": int(n.sum()),
        "flags": ";".join(flags),
    }
    return Contrast(row, {name: _protocol(name, i, len(n)) for name, i in by_column.items()})


def _over_documents(
    changes: np.ndarray,
    n: np.ndarray,
    labels: Sequence[str | None],
    options: Mapping[str, int],
) -> dict[str, Interval]:
    """Intervals of the mean difference that speak about other documents, by column.

    ``changes`` (S, documents) are summed losses of the first minus the second arm, ``n`` tokens.
    """
    mean, tokens = changes.mean(axis=0), grouped(n)
    of_seeds = np.stack([grouped(change) for change in changes])
    found = {
        "difference_hierarchical": hierarchical_interval(
            of_seeds, np.tile(tokens, (len(changes), 1)), **options
        ),
        "difference_documents": mean_interval(grouped(mean), tokens, **options),
    }
    if all(label is not None for label in labels):
        pooled = pool_clusters(labels, mean, n)
        found["difference_clusters"] = mean_interval(*pooled, **options)
    return found


def _protocol(column: str, interval: Interval, n_documents: int) -> dict[str, Any]:
    """How an interval was made, and over what."""
    over_documents = interval_protocol(interval, n_documents)
    units = {
        "difference_hierarchical": f"seeds and {over_documents['units']}",
        "difference_documents": over_documents["units"],
        "difference_clusters": "clusters of documents",
    }
    return {**over_documents, "units": units.get(column, "seeds")}

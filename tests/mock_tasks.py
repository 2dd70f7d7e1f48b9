"""Tables of task scores and of the token view without models: drawn numbers, columns of ours."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from mock_tables import with_ends

from satlens.analysis.result import Result

MODEL, CLOSED = "tiny/satformer", "tiny/satformer + zero-gate"
RETRIEVAL = ("swde", "fda", "squad-completion", "nq", "triviaqa", "drop")
ZERO_SHOT = ("piqa", "hellaswag", "arc-easy", "boolq")
PROVENANCE = {"data": {"sha256": "0" * 64}, "checkpoint": {"sha256": "1" * 64}}


# -- tasks -----------------------------------------------------------------------------------------


def task_answers(
    scores: dict[str, dict[str, float]],
    metric: str = "acc",
    n_passages: int = 40,
    per_passage: int = 2,
    seed: int = 0,
) -> pd.DataFrame:
    """Answers that are right as often as ``scores`` (model -> task -> share) say.

    Passages are harder or easier as wholes, and equally so for every model.
    """
    rows = []
    for t, task in enumerate(dict.fromkeys(name for each in scores.values() for name in each)):
        luck = np.random.default_rng([seed, t]).random((n_passages, 1))
        own = np.random.default_rng([seed, t, 1]).random((n_passages, per_passage))
        for model, of_tasks in scores.items():
            if task not in of_tasks:
                continue
            right = (0.5 * luck + 0.5 * own) < _quantile(of_tasks[task])
            for passage, question in np.ndindex(right.shape):
                value = float(right[passage, question])
                names = (f"p{passage}-q{question}", f"p{passage}")
                rows.append((model, task, metric, *names, value, 1.0, False, False))
    names = ["model", "task", "metric", "question", "passage"]
    table = pd.DataFrame(rows, columns=[*names, "value", "weight", "truncated", "skipped"])
    return _with_counts(table, 1, 300)


def _quantile(share: float) -> float:
    """Of the mean of two uniform numbers, whose distribution is a triangle."""
    return math.sqrt(share / 2) if share <= 0.5 else 1 - math.sqrt((1 - share) / 2)


def tasks(
    scores: dict[str, dict[str, float]],
    *,
    metric: str = "acc",
    chance: float = 0.25,
    half: float = 0.04,
    n_truncated: int = 0,
    n_skipped: int = 0,
) -> pd.DataFrame:
    """A row a model and task: ``scores`` is model -> task -> score."""
    rows = [(model, task, s) for model, of_tasks in scores.items() for task, s in of_tasks.items()]
    table = pd.DataFrame(rows, columns=["model", "task", "score"])
    table = with_ends(table.assign(metric=metric), "score", half)
    counts = {"n_questions": 80, "n_truncated": n_truncated, "n_skipped": n_skipped}
    return _with_counts(table.assign(chance=chance, **counts), 40, 24_000)


def group(table: pd.DataFrame, name: str = "retrieval (mean of 6)") -> pd.DataFrame:
    """The table with a row more a model: the mean over its tasks."""
    mean = table.groupby(["model", "metric"], as_index=False, sort=False).agg(
        dict.fromkeys(("score", "score_low", "score_high", "chance"), "mean")
        | dict.fromkeys(("n_questions", "n_truncated", "n_skipped", "n_documents"), "sum")
        | {"n_tokens": "sum", "flags": "first"}
    )
    return pd.concat([table, mean.assign(task=name)], ignore_index=True)


def task_differences(
    deltas: dict[str, float],
    *,
    model: str = CLOSED,
    baseline: str = MODEL,
    metric: str = "acc",
    half: float = 0.03,
) -> pd.DataFrame:
    """A row a task: intervals are ``half`` wide on each side, p follows from them."""
    table = pd.DataFrame({"task": list(deltas), "delta": list(deltas.values())})
    table = with_ends(table.assign(model=model, baseline=baseline, metric=metric), "delta", half)
    table["p"] = np.where(table["delta"].abs() > half, 0.001, 0.5)
    return _with_counts(table.assign(p_adjusted=np.minimum(1.0, 2 * table["p"])), 40, 48_000)


def task_protocol(names: tuple[str, ...], data: str = "built in") -> pd.DataFrame:
    columns = {
        "version": "1",
        "prompt_hash": "0123456789abcdef",
        "data": data,
        "data_sha256": "ab" * 32,
        "output_type": "multiple_choice",
        "metric_source": "lm-eval 0.4.13",
        "num_fewshot": 0,
        "n_questions": 80,
    }
    return _with_counts(pd.DataFrame({"task": names}).assign(**columns), 40, 24_000)


def task_result(
    closed: float | None = 0.1,
    names: tuple[str, ...] = ("mqar",),
    *,
    score: float = 0.6,
    chance: float = 0.25,
    data: str = "built in",
) -> Result:
    """A whole result; ``closed`` is what every task loses with the gates closed, None without."""
    scores = {MODEL: dict.fromkeys(names, score)}
    parts = []
    if closed is not None:
        scores[CLOSED] = dict.fromkeys(names, score - closed)
        differences = task_differences(dict.fromkeys(names, -closed))
        parts.append(Result("task_differences", differences, PROVENANCE))
    parts.append(Result("task_protocol", task_protocol(names, data), PROVENANCE))
    parts.append(Result("task_answers", task_answers(scores), PROVENANCE))
    table = tasks(scores, chance=chance)
    return Result("tasks", table, PROVENANCE, summary={"tasks": names}, parts=tuple(parts))


# -- tokens ----------------------------------------------------------------------------------------


def token_result(
    texts: tuple[tuple[str, ...], ...] = (("The", " state", " of", "\n"), ("<b>", "a", " b")),
    n_layers: int = 3,
    n_heads: int = 2,
    *,
    intervened: bool = True,
    seed: int = 0,
) -> Result:
    """A token view: gates of every layer and head, and one read of two sources.

    Args:
        texts: tokens of every document.
    """
    rng = np.random.default_rng(seed)
    rows = [(f"d{d}", k, text) for d, tokens in enumerate(texts) for k, text in enumerate(tokens)]
    table = pd.DataFrame(rows, columns=["document", "position", "token"])
    n, first = len(table), table["position"] == 0
    table["category"] = np.tile(["functional", "semantic"], n)[:n]
    table["upos"], table["token_id"] = "NOUN", np.arange(n)
    table["nll"] = np.where(first, np.nan, 4 + rng.standard_normal(n))
    if intervened:
        table["nll_intervened"] = table["nll"] + 0.1 * rng.standard_normal(n)
        table["dnll"] = table["nll_intervened"] - table["nll"]
    table = _with_counts(table, 1, 1).assign(flags=np.where(first, "first", ""))
    channels, values = _channels(table, n_layers, n_heads, rng)
    summary = {
        "intervention": "zero-gate" if intervened else None,
        "documents": [f"d{d}" for d in range(len(texts))],
        "n_tokens": n,
        "nll": float(table["nll"].mean()),
        "nll_intervened": float(table["nll_intervened"].mean()) if intervened else None,
        "left_out": {},
    }
    parts = (
        Result("token_channels", channels, PROVENANCE),
        Result("token_values", values, PROVENANCE, keys=("position",)),
    )
    return Result("token_view", table, PROVENANCE, summary, keys=("position",), parts=parts)


def _channels(
    tokens: pd.DataFrame, n_layers: int, n_heads: int, rng: np.random.Generator
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Channels and their values: half of the gates are exactly zero; routes sum to one."""
    n = len(tokens)
    gate, route = ("attn", "v", "gate"), ("mlp", "shared", "route")
    heads = [(layer, head) for layer in range(1, n_layers) for head in range(n_heads)]
    places = [(f"L{layer}.attn.v", layer, *gate, head, "") for layer, head in heads]
    numbers = [np.maximum(rng.standard_normal(n), 0).astype(np.float32) for _ in heads]
    share = rng.random(n).astype(np.float32)
    for source, value in (("embed", share), ("block 0..1", 1 - share)):
        places.append(("L1.mlp.shared", 1, *route, None, source))
        numbers.append(value)
    names = ["site", "layer", "sublayer", "role", "kind", "head", "source"]
    channels = pd.DataFrame(places, columns=names)
    channels["channel"] = [f"c{k}" for k in range(len(channels))]
    for stat in ("mean", "min", "max"):
        channels[stat] = [float(getattr(np, stat)(value)) for value in numbers]
    channels["zero_fraction"] = [float((value == 0).mean()) for value in numbers]
    channels["varies"] = True
    columns = pd.DataFrame(dict(zip(channels["channel"], numbers, strict=True)))
    values = pd.concat([tokens[["document", "position"]], columns], axis=1)
    return _with_counts(channels, tokens["document"].nunique(), n), _with_counts(values, 1, 1)


def _with_counts(table: pd.DataFrame, n_documents: int, n_tokens: int) -> pd.DataFrame:
    counts = {"n_documents": n_documents, "n_tokens": n_tokens, "flags": ""}
    return pd.concat([table, pd.DataFrame(counts, index=table.index)], axis=1)

"""What one model answered to one task, from the records of lm-evaluation-harness.

Every metric becomes a value and a weight a question, whose weighted mean is the score, after exp
for perplexities. That is what resampling passages needs, and it gives the harness's own numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from satlens.errors import AnalysisError

Scale = Literal["mean", "exp"]
"""How a score follows from the weighted mean of the values of its questions."""


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric of one model's answers to a task, arrays (questions,)."""

    name: str
    scale: Scale
    values: np.ndarray
    """Of each question; NaN where it was skipped. Those of perplexities are nats."""
    weights: np.ndarray
    """Words or bytes of each question where the metric is one of them, else 1."""

    @property
    def answered(self) -> np.ndarray:
        """Questions that have a value."""
        return np.isfinite(self.values)

    def score(self, mean: np.ndarray) -> np.ndarray:
        """The score for a weighted mean of values."""
        return np.exp(mean) if self.scale == "exp" else mean


@dataclass(frozen=True, eq=False)
class Answers:
    """A model's answers to one task."""

    metrics: tuple[Metric, ...]
    truncated: np.ndarray
    """(questions,) bool: a prompt of the question lost its beginning."""
    skipped: np.ndarray
    """(questions,) bool: left out of every score."""
    prompt_hash: str
    """Of every request in order, as text before any tokenizer: 16 digits of a SHA-256."""
    n_tokens: int = 0
    """Tokens that the model read."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is known about the run, for the protocol."""


class _Reading(NamedTuple):
    scale: Scale
    read: Callable[[Any], tuple[float, float]]
    """From what the harness keeps of a question to a value and a weight."""


_READINGS = {
    "mean": _Reading("mean", lambda found: (float(found), 1.0)),
    "perplexity": _Reading("exp", lambda found: (-float(found), 1.0)),
    "weighted_perplexity": _Reading("exp", lambda found: (-found[0] / found[1], found[1])),
    "bits_per_byte": _Reading(
        "mean", lambda found: (-found[0] / (found[1] * math.log(2)), found[1])
    ),
}
"""By the name of the harness's aggregation over questions."""


def answers_of(
    task: str,
    samples: Sequence[Mapping[str, Any]],
    aggregation: Mapping[str, Callable[..., Any]],
    *,
    truncated: Collection[int] = (),
    skipped: Collection[int] = (),
    **counts: Any,
) -> Answers:
    """Answers from the harness's record of every question.

    Args:
        task: its name, for errors.
        samples: one a question and filter, with ``doc_id``, ``arguments``, ``filter``,
            ``metrics`` and a value of each metric.
        aggregation: of each metric over questions, as the task gives it.
        truncated, skipped: numbers of questions.

    Raises:
        AnalysisError: a metric that is no weighted mean over questions; a value of a question that
            is not finite, although the question was not skipped.
    """
    by_filter: dict[str, list[Mapping[str, Any]]] = {}
    for sample in sorted(samples, key=lambda one: one["doc_id"]):
        by_filter.setdefault(sample["filter"], []).append(sample)
    first = next(iter(by_filter.values()))
    numbers = [sample["doc_id"] for sample in first]
    left_out = np.array([number in skipped for number in numbers])
    metrics = []
    for name, records in by_filter.items():
        for metric in records[0]["metrics"]:
            label = metric if len(by_filter) == 1 else f"{metric},{name}"
            scale, values, weights = _read(task, metric, records, aggregation, left_out)
            metrics.append(Metric(label, scale, values, weights))
    return Answers(
        metrics=tuple(metrics),
        truncated=np.array([number in truncated for number in numbers]) & ~left_out,
        skipped=left_out,
        prompt_hash=prompt_hash([sample["arguments"] for sample in first]),
        **counts,
    )


def _read(
    task: str,
    metric: str,
    records: Sequence[Mapping[str, Any]],
    aggregation: Mapping[str, Callable[..., Any]],
    left_out: np.ndarray,
) -> tuple[Scale, np.ndarray, np.ndarray]:
    how = getattr(aggregation.get(metric), "__name__", "none")
    if how not in _READINGS:
        raise AnalysisError(
            f"task {task}: metric {metric}: its aggregation ({how}) is no weighted mean over "
            f"questions ({', '.join(_READINGS)})"
        )
    reading = _READINGS[how]
    values, weights = np.full(len(records), np.nan), np.zeros(len(records))
    for place, record in enumerate(records):
        if left_out[place]:
            continue
        values[place], weights[place] = reading.read(record[metric])
        if not math.isfinite(values[place]):
            raise AnalysisError(
                f"task {task}: question {record['doc_id']}: {metric} is {values[place]}"
            )
    return reading.scale, values, weights


def prompt_hash(arguments: Sequence[Any]) -> str:
    """First 16 digits of the SHA-256 over the arguments of all requests, in order, as JSON.

    It covers contexts, answers to be scored and settings of generation, with their whitespace.
    """
    text = json.dumps(arguments, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]

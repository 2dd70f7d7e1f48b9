"""Batches of a model for lm-eval: log-probabilities of tokens, and greedy continuations.

A batch is run whole or, where all of it is answered, not at all: an evaluation that continues has
the bits of one that was never stopped.

Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from satlens.data.tokenizers import backend
from satlens.errors import AnalysisError
from satlens.interop.lm_eval.answers import Answers
from satlens.interop.lm_eval.requests import Prompt, Row, Scoring
from satlens.models.cache import KVCache
from satlens.models.decoder import Decoder

PaddingSide = Literal["left", "right"]
PADDING_SIDES: tuple[str, ...] = get_args(PaddingSide)


Item = TypeVar("Item")

Show = Callable[[int], Any]
"""Called with how many of the requests are answered."""

# Of one row: log-probability, and whether all its targets are the likeliest tokens.
Score = tuple[float, bool]


def answer_scorings(
    model: Decoder,
    wanted: Mapping[str, Scoring],
    answers: Answers,
    batch_size: int,
    side: PaddingSide,
    show: Show,
) -> None:
    """Add (log-probability, whether its tokens are the likeliest) of each request by its key.

    Raises:
        AnalysisError: a log-probability that is not finite.
    """
    # Equal inputs, as of choices of one token, are read once.
    same: dict[tuple[int, ...], list[tuple[str, int, Row]]] = {}
    for request in wanted.values():
        for number, row in enumerate(request.rows):
            same.setdefault(row.inputs, []).append((request.key, number, row))
    order = list(same.values())
    if all(len(request.rows) == 1 for request in wanted.values()):
        # Rows of one length need no padding. Windows of one text stay together: its answer is
        # there only once all of them are.
        order.sort(key=lambda rows: (-len(rows[0][2].inputs), rows[0][2].inputs))
    parts: dict[str, dict[int, Score]] = {request.key: {} for request in wanted.values()}
    done = {key for key, request in wanted.items() if not request.rows}
    answers.add(dict.fromkeys(done, (0.0, True)))
    for batch in _batches(order, batch_size):
        owners = {key for rows in batch for key, _, _ in rows}
        if not all(key in answers for key in owners):
            scores = score(model, [[row for _, _, row in rows] for rows in batch], side)
            for rows, found in zip(batch, scores, strict=True):
                for (key, number, _), value in zip(rows, found, strict=True):
                    parts[key][number] = value
            whole = [key for key in owners if len(parts[key]) == len(wanted[key].rows)]
            answers.add({key: _total(wanted[key], parts[key]) for key in whole})
        done |= {key for key in owners if key in answers}
        show(len(done))


def answer_prompts(
    model: Decoder,
    wanted: Mapping[str, Prompt],
    answers: Answers,
    batch_size: int,
    ends: Collection[int],
    show: Show,
) -> None:
    """Add the greedy continuation of each prompt by its key; ``ends`` are tokens that end one."""
    groups: dict[tuple[tuple[str, ...], int], list[Prompt]] = {}
    for prompt in sorted(wanted.values(), key=lambda each: (-len(each.tokens), each.tokens)):
        groups.setdefault((prompt.until, prompt.n_new), []).append(prompt)
    done = 0
    for (until, n_new), group in groups.items():
        for batch in _batches(group, batch_size):
            if not all(prompt.key in answers for prompt in batch):
                tokens = [prompt.tokens for prompt in batch]
                texts = continuations(model, tokens, until, n_new, ends)
                keys = [prompt.key for prompt in batch]
                answers.add(dict(zip(keys, texts, strict=True)))
            done += len(batch)
            show(done)


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _total(request: Scoring, parts: Mapping[int, Score]) -> Score:
    """The sum over a request's rows, in their order."""
    ordered = [parts[number] for number in range(len(request.rows))]
    total = sum(value for value, _ in ordered)
    if not isfinite(total):
        raise AnalysisError(f"{request.where}: the log-probability is not finite")
    return total, all(likeliest for _, likeliest in ordered)


def padded(
    rows: Sequence[Sequence[int]], side: PaddingSide, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Ids (B, T) of rows, and which of them are no padding, (B, T) bool; None if all are."""
    width = max(map(len, rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        tokens[i, place] = torch.tensor(row)
        real[i, place] = True
    return tokens.to(device), None if real.all() else real.to(device)


@torch.no_grad()
def score(model: Decoder, batch: Sequence[Sequence[Row]], side: PaddingSide) -> list[list[Score]]:
    """Log-probability in nats of each row's targets together, and whether all are the likeliest.

    The softmax is fp32 or wider, the sum float64.

    Args:
        batch: for each row of the pass, those that read its inputs.
        side: where shorter rows of the pass are padded.
    """
    tokens, real = padded([same[0].inputs for same in batch], side, model.device)
    logits = model(tokens, attention_mask=real)
    found = []
    for same, each in zip(batch, logits, strict=True):
        n_read = len(same[0].inputs)
        end = n_read if side == "right" else len(each)
        # The softmax of what some row is scored on, and of nothing else.
        longest = max(len(row.targets) for row in same)
        found.append(_scores(same, each[end - longest : end].log_softmax(-1)))
    return found


def _scores(rows: Sequence[Row], known: Tensor) -> list[Score]:
    """Scores of rows whose targets follow the last of ``known`` (n, V)."""
    likeliest, scores = known.argmax(-1), []
    for row in rows:
        targets = torch.tensor(row.targets, device=known.device)
        n = len(targets)
        each = known[-n:].gather(1, targets[:, None])
        total = each.cpu().double().sum().item()
        scores.append((total, bool((likeliest[-n:] == targets).all())))
    return scores


@torch.no_grad()
def continuations(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    until: Sequence[str],
    n_new: int,
    ends: Collection[int],
) -> list[str]:
    """Greedy continuations as text.

    Args:
        prompts: ids; shorter ones are padded on the left.
        until: texts that end one; it has what comes before the first of them.
        n_new: tokens of one at most.
        ends: tokens that end one.
    """
    tokens, real = padded(prompts, "left", model.device)
    inner = backend(model.tokenizer)
    cache = KVCache(reserve=tokens.shape[1] + n_new)
    if tokens.shape[1] > 1:  # only the last token of a prompt needs logits
        before = None if real is None else real[:, :-1]
        model(tokens[:, :-1], None, attention_mask=before, past=cache)
    latest = tokens[:, -1:]
    new: list[list[int]] = [[] for _ in prompts]
    texts = [""] * len(prompts)
    running = dict.fromkeys(range(len(prompts)))
    for _ in range(n_new):
        latest = model(latest, past=cache)[:, -1].argmax(-1, keepdim=True)
        chosen = latest[:, 0].tolist()
        for i in list(running):
            if chosen[i] not in ends:
                new[i].append(chosen[i])
                texts[i] = inner.decode(new[i], skip_special_tokens=True)
            if chosen[i] in ends or any(stop in texts[i] for stop in until):
                del running[i]
        if not running:
            break
    for stop in until:
        texts = [text.split(stop)[0] for text in texts]
    return texts

"""Edge patching: V_1 of a clean run at one (layer, head, token) of a corrupted run.

Layer n mixes V'_n[t, k] = scale V_n[t, k] + gate V_1[t, k]. An edge runs from V_1 to one such sum:
patching it hands the layer the clean run's V_1 there and changes nothing else, neither what other
layers and tokens receive from V_1 nor layer 0's own attention. What the changed value does later on
is followed to the logits.

Shapes: B batch, T position, K KV heads, E head width, V vocabulary, N layers that mix V_1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from satlens.analysis.engine.stream import measuring
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder

Metric = Callable[[Tensor], Tensor]
"""Logits (B, T, V) of one run -> one number."""

AT_ONCE = 64
"""Rows in a forward pass."""


class VFirstPatching(NamedTuple):
    """What each edge from V_1 carries of a metric."""

    effect: Tensor
    """(N, K, T), float64: the metric with the edge patched minus that of the corrupted run."""
    layers: tuple[int, ...]
    """Layers of the first axis."""
    clean: float
    """The metric of the clean run."""
    corrupted: float
    """The metric of the corrupted run."""

    @property
    def recovered(self) -> Tensor:
        """Effects as shares of the way from the corrupted to the clean run, (N, K, T)."""
        return self.effect / (self.clean - self.corrupted)


@torch.no_grad()
def patch_v_first(
    model: Decoder,
    clean: Tensor | str | list[str],
    corrupted: Tensor | str | list[str],
    metric: Metric | None = None,
    *,
    rows_at_once: int = AT_ONCE,
) -> VFirstPatching:
    """Patch every edge from V_1 to a (layer, KV head, token) on its own.

    Args:
        clean: (B, T) ids or text, the run that V_1 is taken from.
        corrupted: the run that is patched, of the same shape.
        metric: of the logits (B, T, V); by default the mean over rows, at the last position, of the
            logit of the token that the clean run ranks first minus that of the corrupted run's.
        rows_at_once: edges times B in a forward pass; changes memory, and numbers by rounding only.

    Raises:
        AnalysisError: a model without a value residual, runs of different shapes, a metric that is
            not one number; without a metric, a row whose two runs predict the same token.
    """
    layers = tuple(model.cfg.value_layers)
    if not layers:
        raise AnalysisError(f"patch_v_first: this model ({model.cfg.variant}) has no V_1 to patch")
    source, target = (
        t.to(model.device) if isinstance(t, Tensor) else model.to_tokens(t)
        for t in (clean, corrupted)
    )
    if source.shape != target.shape:
        raise AnalysisError(
            f"patch_v_first: clean has the shape {[*source.shape]}, corrupted {[*target.shape]}"
        )
    with measuring(model):
        clean_logits, v_first = _clean_run(model, source)
        corrupted_logits = model(target)
        measure = metric or _logit_difference(clean_logits, corrupted_logits)
        before = _number(measure(corrupted_logits))
        effects = [
            _effects(model, target, v_first, layer, measure, rows_at_once) for layer in layers
        ]
        after = _number(measure(clean_logits))
    return VFirstPatching(torch.stack(effects), layers, after, before)


def _clean_run(model: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and V_1 (B, T, K, E)."""
    found: list[Tensor] = []

    def note(tensor: Tensor, hook: object) -> None:
        found.append(tensor.clone())

    with model.hooks([("hook_v_first", note)]):
        logits = model(tokens)
    return logits, found[0]


def _effects(
    model: Decoder, tokens: Tensor, v_first: Tensor, layer: int, measure: Metric, rows: int
) -> Tensor:
    """The effect of every edge to one layer, (K, T); the state below it is computed once.

    Every pass has the same rows, the last ones of the last pass without use. Its rows are compared
    with the same rows of a pass that patches nothing, so an edge that changes nothing has exactly
    no effect.
    """
    n_rows, length = tokens.shape
    n_heads = model.cfg.n_key_value_heads
    edges = [(head, t) for head in range(n_heads) for t in range(length)]
    at_once = max(1, min(rows // n_rows, len(edges)))
    repeated = tokens.repeat(at_once, 1)
    below = model(repeated, stop_at_layer=layer)

    def metrics(some: list[tuple[int, int]]) -> list[float]:
        def patch(value: Tensor, hook: object) -> Tensor:
            patched = value.unflatten(0, (at_once, n_rows))
            for row, (head, t) in enumerate(some):
                patched[row, :, t, head] = v_first[:, t, head]
            return value

        with model.hooks([(f"blocks.{layer}.attn.hook_v_first", patch)]):
            logits = model(repeated, start_at=below)
        return [_number(measure(one)) for one in logits.unflatten(0, (at_once, n_rows))]

    unpatched = metrics([])
    found = torch.empty(n_heads, length, dtype=torch.float64)
    for start in range(0, len(edges), at_once):
        some = edges[start : start + at_once]
        for (head, t), after, before in zip(some, metrics(some), unpatched, strict=False):
            found[head, t] = after - before
    return found


def _logit_difference(clean: Tensor, corrupted: Tensor) -> Metric:
    """The default metric, of the answers that the two runs give."""
    right, wrong = clean[:, -1].argmax(-1), corrupted[:, -1].argmax(-1)
    same = (right == wrong).nonzero()[:, 0].tolist()
    if same:
        raise AnalysisError(
            f"patch_v_first: row {same[0]}: the clean and the corrupted run predict the same token "
            f"({int(right[same[0]])}); pass a metric"
        )
    rows = torch.arange(len(right), device=right.device)

    def difference(logits: Tensor) -> Tensor:
        last = logits[:, -1].double()
        return (last[rows, right] - last[rows, wrong]).mean()

    return difference


def _number(value: Any) -> float:
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    found = [*value.shape] if isinstance(value, Tensor) else type(value).__name__
    raise AnalysisError(f"patch_v_first: metric: must give one number, got {found}")

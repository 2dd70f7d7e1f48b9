"""satlens models under nnsight: every hook point is a module whose output a trace reads and edits.

    from satlens.interop.nnsight import wrap
    traced = wrap(model)
    with traced.trace(tokens):
        traced.blocks[1].attn.hook_v_gate.output = 0 * traced.blocks[1].attn.hook_v_gate.output
        logits = traced.output.save()

nnsight replaces the forward of each module and leaves no hook that a model could see, so a satlens
model would take its fused steps and pass hook points by. :func:`wrap` makes it visit all of them
for the length of a trace, and compute scores and patterns as tensors (``attention="eager"``).
Interventions through a trace then equal ours, to the bit, under ``satlens.attention("eager")``.

``traced.trace(prompt, fn="generate", max_new_tokens=n)`` traces generation; its passes are the
prompt without its last token, then one token each.

A hook point's own hooks (``satlens.intervene``, ``model.hooks``) run after nnsight has served its
output: inside them a trace reads what they are given, not what they make of it.

Importing this module imports nnsight, which gives every object in the process a ``save``.

Shapes: B batch, T position.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
from nnsight import NNsight
from torch import Tensor

from satlens.data.tokenizers import encode
from satlens.errors import ConfigError, DataError
from satlens.hooks import ReadOnly
from satlens.models.attention import Implementation, attention
from satlens.models.decoder import Decoder

# Arguments of a forward pass that have an entry for each token, and what padding gets there.
PADDING = {"attention_mask": 0, "documents": -1, "targets": -100}
# What an invoke that does not give them gets; targets have no default.
_DEFAULTS = {"attention_mask": 1, "documents": 0}
_UNSEEN = ("hook_attn_scores", "hook_pattern")


class TracedDecoder(NNsight):
    """A decoder for nnsight, which combines several invokes into one batch.

    Invokes of different lengths are padded on the left, as nnsight's own language models are:
    counted from the end, positions of an invoke are its own. Each invoke sees its own rows of
    hook points, whose first axis is the batch; what blocks pass on is for the model alone.

    Args:
        model: the decoder. It is the wrapped module itself; outside traces it works as before.
        implementation: of attention, inside traces.
    """

    _module: Decoder
    _implementation: Implementation

    def __init__(self, model: Decoder, implementation: Implementation = "eager") -> None:
        self._implementation = implementation
        super().__init__(model)

    def interleave(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model with a trace's interventions."""
        seen = self._implementation == "eager"
        with attention(self._implementation), _visited(self._module, seen):
            return super().interleave(fn, *args, **kwargs)

    # -- several invokes ----------------------------------------------------------------------

    def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
        """Rows of an invoke's tokens or texts; 0 for settings alone."""
        tokens = inputs[0] if inputs else kwargs.get("tokens")
        if tokens is None:
            return 0
        return 1 if isinstance(tokens, str) else len(tokens)

    def _batch(self, invokes: list[tuple[Any, Any]], fn: Any) -> tuple[Any, Any]:
        """One call for several invokes.

        Raises:
            DataError: settings that differ between invokes, ``targets`` that some leave out, text
                without a tokenizer.
        """
        if len(invokes) < 2:
            return super()._batch(invokes, fn)
        given = [_arguments(inputs, kwargs) for inputs, kwargs in invokes]
        rows = [self._rows(one.pop("tokens")) for one in given]
        longest = max(len(row) for group in rows for row in group)
        tokens = torch.stack([_padded(row, longest, 0) for group in rows for row in group])
        padded = any(len(row) < longest for group in rows for row in group)
        wanted = {name for one in given for name in one if name in PADDING}
        if padded:
            wanted.add("attention_mask")
        combined = {
            name: _combined(name, [one.pop(name, None) for one in given], rows, longest)
            for name in sorted(wanted)
        }
        settings = given[0]
        for other in given[1:]:
            if other != settings:
                raise DataError(f"invoke: settings differ: {settings} and {other}")
        return (tokens,), {**combined, **settings}

    def _rows(self, tokens: Any) -> list[Tensor]:
        """Ids of each row, (T,) each."""
        if isinstance(tokens, Tensor):
            return list(tokens)
        texts = [tokens] if isinstance(tokens, str) else tokens
        return [torch.from_numpy(row) for row in encode(self._module._tokenizer(), texts)]


def wrap(model: Decoder, attention: Implementation = "eager") -> TracedDecoder:
    """A model for ``with wrap(model).trace(tokens):``.

    Args:
        attention: how attention is computed inside a trace. ``eager`` shows everything; with
            ``auto`` or ``fused`` scores and patterns do not exist, and asking a trace for them is
            nnsight's error for what never ran.

    Raises:
        ConfigError: no satlens model, or an unknown implementation.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(f"model: expected a satlens model, got {type(model).__name__}")
    if attention not in get_args(Implementation):
        raise ConfigError(f"attention: must be auto, eager or fused, got {attention!r}")
    return TracedDecoder(model, attention)


@contextmanager
def _visited(model: Decoder, scores: bool) -> Iterator[None]:
    """Make the model visit its hook points: it does where it finds a hook, which here does nothing.

    Args:
        scores: also those of scores and patterns, which need attention to be explicit.
    """
    look = ReadOnly(lambda *args: None)
    points = [p for name, p in model.hook_dict.items() if scores or not name.endswith(_UNSEEN)]
    handles = [point.register_forward_hook(look) for point in points]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _arguments(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An invoke's arguments by name."""
    names = ("tokens", "return_type")
    return {**dict(zip(names, inputs, strict=False)), **kwargs}


def _combined(name: str, given: list[Any], rows: list[list[Tensor]], longest: int) -> Tensor:
    """One (B, T) argument of all invokes."""
    parts = []
    for value, group in zip(given, rows, strict=True):
        if value is None and name not in _DEFAULTS:
            raise DataError(f"invoke: {name} is given in some invokes only")
        for i, row in enumerate(group):
            own = torch.full_like(row, _DEFAULTS.get(name, 0)) if value is None else value[i]
            parts.append(_padded(own, longest, PADDING[name]))
    return torch.stack(parts)


def _padded(row: Tensor, length: int, padding: int) -> Tensor:
    """A row filled up on the left."""
    return torch.nn.functional.pad(row, (length - len(row), 0), value=padding)

"""What a forward pass under interventions reads: its tokens, which are real, and where they stand.

Everything is worked out when an intervention asks for it, once a pass.

Shapes: B batch, T position, S positions of a cache and the new ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.engine.stream import current_batch
from satlens.data.dataset import DocumentTokens
from satlens.data.tokenizers import special_ids
from satlens.data.windows import Batch
from satlens.errors import AnalysisError
from satlens.models.block import Snapshot
from satlens.models.cache import KVCache
from satlens.models.decoder import Decoder

Made = TypeVar("Made")


class Running:
    """The pass that a model is in.

    Args:
        model: whose passes these are.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._special: Tensor | None = None
        self._tokens: Any = None
        self._masks: dict[str, Tensor | None] = {}
        self._past: KVCache | None = None
        self._made: dict[Any, Any] = {}
        self._ended: Snapshot | None = None
        self._seen: dict[str, Tensor] = {}

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A pass begins with these arguments of :meth:`satlens.models.decoder.Decoder.forward`."""
        self._tokens = args[0] if args else kwargs.get("tokens")
        self._masks = {name: kwargs.get(name) for name in ("documents", "attention_mask")}
        past = kwargs.get("past")
        self._past = past if isinstance(past, KVCache) else None
        self._made = {}
        if self._ended is None or kwargs.get("start_at") is not self._ended:
            self._seen = {}

    def end(self, output: Any) -> None:
        """The pass gave ``output``."""
        self._ended = output if isinstance(output, Snapshot) else None

    @property
    def seen(self) -> dict[str, Tensor]:
        """Activations of this pass that interventions keep, by hook point, and of the passes that
        it continues; of the last one when it is over."""
        return self._seen

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """``make()``, or what it gave when this pass first asked for ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @property
    def tokens(self) -> Tensor:
        """(B, T) ids.

        Raises:
            AnalysisError: no pass of the whole model is running.
        """
        if self._tokens is None:
            raise AnalysisError("intervene: no tokens: this needs a pass as model(tokens) runs it")
        if not isinstance(self._tokens, Tensor):
            self._tokens = self._model.to_tokens(self._tokens)
        return self._tokens

    @property
    def start(self) -> int:
        """Place of the first of them: those before it are in a cache."""
        return 0 if self._past is None else len(self._past)

    @property
    def batch(self) -> Batch | None:
        """The batch of an analysis that these tokens are; None outside of one."""
        current = current_batch()
        return current[1] if current is not None and current[1].tokens is self._tokens else None

    @property
    def documents(self) -> list[DocumentTokens] | None:
        """The document of each row; None outside of an analysis."""
        current = current_batch()
        if current is None or self.batch is None:
            return None
        return [current[0].documents[number] for number in self.batch.document.tolist()]

    @property
    def valid(self) -> Tensor:
        """(B, T) bool, real tokens that are not special."""
        return self.once("valid", self._valid)

    @property
    def position(self) -> Tensor:
        """(B, T) int64, place of each token in its document, padding before it not counted."""
        return self.once("position", self._position)

    def permutation(self, seed: int) -> Tensor:
        """(B, T) index that permutes the valid places of each row and keeps the others."""
        return self.once(("permutation", seed), lambda: _permutations(self, seed))

    def _valid(self) -> Tensor:
        if self.batch is not None:
            return self.batch.valid
        tokens = self.tokens
        if self._special is None:
            tokenizer = self._model.tokenizer
            special = frozenset() if tokenizer is None else special_ids(tokenizer)
            self._special = torch.tensor(sorted(special), dtype=torch.int64)
        valid = ~torch.isin(tokens, self._special.to(tokens.device))
        for name, padding in (("documents", -1), ("attention_mask", 0)):
            mask = self._masks[name]
            if mask is not None:
                valid = valid & (mask != padding)
        return valid

    def _position(self) -> Tensor:
        tokens, documents = self.tokens, self._masks["documents"]
        mask = self._masks["attention_mask"]
        padding = None if mask is None else mask == 0
        if self._past is not None:
            documents = self._past.all_documents(tokens, documents, padding)
        elif padding is not None:
            documents = torch.zeros_like(tokens) if documents is None else documents
            documents = documents.masked_fill(padding, -1)
        length = tokens.shape[1]
        place = torch.arange(self.start + length, device=tokens.device)
        if documents is None:
            return place[-length:].expand_as(tokens)
        begins = torch.zeros_like(documents)
        differs = documents[:, 1:] != documents[:, :-1]
        begins[:, 1:] = torch.where(differs, place[1:], 0)
        return (place - begins.cummax(1).values)[:, -length:]


def _permutations(running: Running, seed: int) -> Tensor:
    tokens, valid = running.tokens, running.valid
    index = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
    for row, (ids, real) in enumerate(zip(tokens.cpu(), valid.cpu(), strict=True)):
        places = real.nonzero()[:, 0]
        content = f"{seed}:".encode() + ids[places].numpy().astype("<i8").tobytes()
        entropy = int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
        order = np.random.default_rng(entropy).permutation(len(places))
        index[row, places] = places[torch.from_numpy(order)]
    return index.to(tokens.device)

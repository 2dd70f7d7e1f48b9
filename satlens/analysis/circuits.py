"""What V_1 carries: how much of each head's say on the next token, and by which circuit.

Four views of every query head: the direct logit attribution of what it takes from V_1 beside that
of the rest; the tokens that its V_1 part speaks for; the OV circuit from V_1 to the logits, with
its copying scores; and whether its pattern is that of an induction or previous-token head, with
gates on and off.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from satlens.analysis.engine.descriptive import Descriptive, Inputs, measure
from satlens.analysis.engine.inputs import documents_in, interval_protocol, split_notes
from satlens.analysis.engine.stream import Progress, Reducer
from satlens.analysis.heads.attribution import HeadAttribution
from satlens.analysis.heads.induction import SHORTEST_HALF, half_length, measure_repetition
from satlens.analysis.heads.ov_circuits import circuit_of, first_values, tried
from satlens.analysis.heads.tables import (
    attribution_of,
    head_table,
    lens_table,
    pair_table,
    summary_of,
)
from satlens.analysis.result import Result
from satlens.analysis.stats import N_RESAMPLES
from satlens.data.tokenizers import special_ids
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder

N_INDUCTION = 64
TOP_K = 5
CAPTURED_BYTES = 2**31
"""How much memory the activations that a pass captures of one batch may take."""


class Circuits(Descriptive):
    """The analysis with its settings; see :func:`circuits`."""

    name = "circuits"
    has_baseline = False

    def __init__(self, n_induction: int = N_INDUCTION, top_k: int = TOP_K) -> None:
        for setting, value in (("n_induction", n_induction), ("top_k", top_k)):
            if value < 1:
                raise AnalysisError(f"circuits: {setting}: must be positive, got {value}")
        self.n_induction, self.top_k = n_induction, top_k

    def at_once(self, model: Decoder, batch_size: int, max_tokens: int | None) -> int:
        """Fewer windows where two outputs of every head and the weights of routes are many."""
        cfg = model.cfg
        length = min(cfg.n_ctx, max_tokens or cfg.n_ctx)
        heads = (2 * cfg.n_layers + 2) * cfg.n_heads * cfg.d_head
        patterns = 3 * cfg.n_heads * length  # of the running layer
        numbers = length * (heads + patterns + 3 * cfg.n_layers * cfg.d_model)
        window = numbers * max(4, model.dtype.itemsize)
        return min(batch_size, max(1, CAPTURED_BYTES // window))

    def check(self, model: Decoder) -> None:
        if not model.cfg.value_layers:
            raise AnalysisError(
                f"circuits: this model ({model.cfg.variant}) adds no V_1 to its values"
            )
        longest = half_length(model, model.cfg.d_vocab)
        if longest < SHORTEST_HALF:
            raise AnalysisError(
                f"circuits: induction needs {SHORTEST_HALF} tokens twice, and context, window and "
                f"vocabulary have room for {longest}"
            )

    def reducers(self, model: Decoder, inputs: Inputs) -> list[Reducer]:
        return [HeadAttribution(model, inputs.n_groups)]

    def result(
        self, inputs: Inputs, trained: Sequence[Reducer], initial: Sequence[Reducer] | None
    ) -> Result:
        (heads,) = trained
        assert isinstance(heads, HeadAttribution)
        model, options = inputs.model, inputs.options
        tokens = tokens_that_occur(inputs)
        repetition = measure_repetition(
            model,
            tokens,
            self.n_induction,
            batch_size=inputs.windows.batch_size,
            progress=inputs.progress,
            **options,
        )
        values = first_values(model, tokens)
        circuits = {
            (layer, head): circuit_of(model, tokens, values, layer, head, self.top_k)
            for layer in heads.layers
            for head in range(model.cfg.n_heads)
        }
        attribution = attribution_of(heads.sums, options)
        n_documents = inputs.windows.n_documents
        counts = {
            "n_documents": int(documents_in(heads.sums["n"], n_documents)),
            "n_tokens": int(heads.sums["n"].sum()),
        }
        table = head_table(model, attribution, circuits, repetition, counts)
        source = inputs.provenance()
        parts = (
            lens_table(heads, tokens, inputs.tokenizer, self.top_k, source, counts),
            pair_table(circuits, inputs.tokenizer, source, counts),
        )
        summary = summary_of(heads, attribution, repetition, table, options)
        summary["interval"] = interval_protocol(attribution.means, n_documents)
        summary |= {"n_token_types": len(tokens), "n_sources": len(tried(len(tokens)))}
        notes = [*_NOTES, *(_SIGNED_NOTES if _signed(model) else ()), *split_notes(inputs.windows)]
        return Result("circuits", table, source, summary, notes, keys=("kv_head",), parts=parts)


def circuits(
    model: Decoder,
    data: Any,
    *,
    n_induction: int = N_INDUCTION,
    top_k: int = TOP_K,
    split: str = "test",
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> Result:
    """What each head takes from V_1 and what it does with it, on any stream.

    Args:
        data: a token tensor, a text, documents, a path or a prepared dataset.
        n_induction: random sequences for the pattern scores.
        top_k: tokens and pairs of tokens named of each head.
        split: of prepared data.
        batch_size: fewer windows are taken where what is captured of them exceeds 2 GiB.
        n_resamples, seed: of the bootstrap; the seed also draws the sequences.
        resume_dir: where a killed pass over the data continues from.

    Returns:
        ``circuits``: a row a (layer, query head). ``dla_v_first`` and ``dla_rest`` are the mean
        direct logit attributions to the next token, minus the vocabulary's mean, of what the head
        takes from V_1 and of the rest (nats of logit); ``share`` is the V_1 part's of their mean
        sizes; ``copying`` and ``copying_eigenvalues`` are those of the V_1 circuit
        (:mod:`satlens.analysis.heads.ov_circuits`); ``induction`` and ``previous_token`` with
        ``<score>_gates_off`` and ``<score>_gate_effect`` those of the pattern. Layers that mix no
        V_1 have the statistics that need none. Parts: ``circuits_lens``, the tokens that each V_1
        part raises the most on average; ``circuits_pairs``, the strongest pairs of its circuit.

    Raises:
        AnalysisError: a model without a value residual; hooks that edit what sublayers read.
        DataError: bad data, or data of another tokenizer.
    """
    analysis = Circuits(n_induction, top_k)
    (result,) = measure(
        model,
        data,
        [analysis],
        label="circuits",
        split=split,
        batch_size=batch_size,
        max_documents=max_documents,
        max_tokens_per_document=max_tokens_per_document,
        n_resamples=n_resamples,
        seed=seed,
        progress=progress,
        resume_dir=resume_dir,
    )
    return result


_NOTES = (
    "Rows are query heads; kv_head is the one whose gate and values a query head shares.",
    "Direct attribution goes through the model's own ending with the final norm's scale and the "
    "weights of every read as they were: what later sublayers make of a head is not in it.",
    "Tokens are those whose next token is scored; the first of each context is in the summary "
    "only.",
    "copying is the share of tokens whose own logit the V_1 circuit raises the most; "
    "copying_eigenvalues is sum lambda / sum |lambda| of that circuit. Both come from weights "
    "alone, per unit of gate and attention, over the tokens that occur in the data.",
    "induction and previous_token are mean attention on random repeated tokens; gates off sets "
    "every gate to zero, and the effect is on minus off. Their intervals cover other sequences.",
)
_SIGNED_NOTES = (
    "Gates of this model can be negative, and a negative gate turns its circuit's copying into "
    "its opposite.",
)


def _signed(model: Decoder) -> bool:
    return any(site.support == "signed" for site in model.sites if site.kind == "gate")


def tokens_that_occur(inputs: Inputs) -> np.ndarray:
    """Ids of the documents' tokens that are not special, each once, in order.

    Raises:
        AnalysisError: too few for a sequence of them to be repeated.
    """
    special = frozenset() if inputs.tokenizer is None else special_ids(inputs.tokenizer)
    found: set[int] = set()
    for document in inputs.windows.documents:
        found.update(np.unique(document.tokens).tolist())
    tokens = np.array(sorted(found - special), dtype=np.int64)
    if len(tokens) < SHORTEST_HALF:
        raise AnalysisError(f"circuits: needs {SHORTEST_HALF} different tokens, got {len(tokens)}")
    return tokens

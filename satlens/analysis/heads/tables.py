"""Tables of the V_1 circuits: heads, what their V_1 parts speak for, pairs of tokens, headlines.

Shapes: L layers, N layers that mix V_1, H query heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from satlens.analysis.engine.accumulators import GroupSums
from satlens.analysis.engine.inputs import interval_columns, interval_summary
from satlens.analysis.heads.attribution import HeadAttribution
from satlens.analysis.heads.induction import SCORES, Repetition
from satlens.analysis.heads.ov_circuits import Circuit
from satlens.analysis.result import Result, flag_column, join_marks
from satlens.analysis.stats import Interval, divide, ratio_interval
from satlens.data.tokenizers import decode
from satlens.models.decoder import Decoder
from satlens.models.layers import at_least_fp32

_NO_V_FIRST = "no_v_first"
_NAMED = 8  # heads that the summary names

Counts = dict[str, int]
"""``n_documents`` and ``n_tokens`` of every row."""


class Attribution(NamedTuple):
    """Intervals of direct attributions."""

    means: Interval
    """(2, L, H): V_1 part, rest."""
    share: Interval
    """(L, H)"""


def attribution_of(sums: GroupSums, options: dict[str, Any]) -> Attribution:
    """Means over tokens and shares of size, from the sums of :class:`HeadAttribution`."""
    both = np.stack((sums["v_first"], sums["rest"]), axis=1)
    size = sums["v_first_size"]
    return Attribution(
        ratio_interval(both, sums["n"], **options),
        ratio_interval(size, size + sums["rest_size"], **options),
    )


def head_table(
    model: Decoder,
    attribution: Attribution,
    circuits: dict[tuple[int, int], Circuit],
    repetition: Repetition,
    counts: Counts,
) -> pd.DataFrame:
    """A row a (layer, query head), with gaps where a layer mixes no V_1."""
    cfg = model.cfg
    layer, head = (a.ravel() for a in np.indices((cfg.n_layers, cfg.n_heads)))
    mixes = np.isin(layer, cfg.value_layers)
    columns: dict[str, Any] = {}
    flags: dict[str, np.ndarray] = {}

    def add(name: str, interval: Interval, cell: Any = ..., only: Any = True) -> None:
        for column, values in interval_columns(name, interval, cell).items():
            columns[column] = np.where(only, values.ravel(), np.nan)
        flags[name] = np.where(only, interval.flags[cell].ravel(), "").astype(object)

    add("dla_v_first", attribution.means, 0, mixes)
    add("dla_rest", attribution.means, 1)
    add("share", attribution.share, ..., mixes)
    for name in ("copying", "copying_eigenvalues"):
        found = [circuits.get((int(n), int(h))) for n, h in zip(layer, head, strict=True)]
        columns[name] = [np.nan if c is None else getattr(c, name) for c in found]
    for number, name in enumerate(SCORES):
        for case, suffix in (("on", ""), ("off", "_gates_off"), ("effect", "_gate_effect")):
            add(name + suffix, repetition.scores[case], number)
    return pd.DataFrame(
        {
            "layer": layer,
            "head": head,
            "kv_head": head // (cfg.n_heads // cfg.n_key_value_heads),
            **columns,
            **counts,
            "flags": join_marks(np.where(mixes, "", _NO_V_FIRST), _flags(flags, mixes)),
        }
    )


def _flags(flags: dict[str, np.ndarray], mixes: np.ndarray) -> np.ndarray:
    """Flags of the statistics that a row has."""
    own = {name: f for name, f in flags.items() if name not in ("dla_v_first", "share")}
    text = flag_column(own)
    text[mixes] = flag_column({name: f[mixes] for name, f in flags.items()})
    return text


# -- parts -----------------------------------------------------------------------------------------


def token_text(tokenizer: Any, token: int) -> str:
    """A token as text on one line; empty without a tokenizer."""
    return "" if tokenizer is None else repr(decode(tokenizer, [token]))[1:-1]


@torch.no_grad()
def lens_table(
    heads: HeadAttribution,
    tokens: np.ndarray,
    tokenizer: Any,
    top_k: int,
    source: dict[str, Any],
    counts: Counts,
) -> Result:
    """The logit lens of what each head takes from V_1: its mean logits over tokens, the largest."""
    W_U = at_least_fp32(heads.model.W_U).double().cpu().numpy()
    columns = W_U[:, tokens] - W_U.mean(axis=1, keepdims=True)
    mean = divide(heads.written["v_first"].sum(axis=0), np.array(float(counts["n_tokens"])))
    rows = []
    for number, layer in enumerate(heads.layers):
        for head, logits in enumerate(mean[number] @ columns):
            top = np.argsort(-logits, kind="stable")[:top_k]
            for rank, place in enumerate(top.tolist(), start=1):
                token = int(tokens[place])
                text = token_text(tokenizer, token)
                rows.append((layer, head, rank, token, text, logits[place]))
    names = ["layer", "head", "rank", "token_id", "token", "logit"]
    table = pd.DataFrame(rows, columns=names).assign(**counts, flags="")
    notes = [
        "Mean over tokens of the logits that a head's V_1 part writes directly, minus the "
        "vocabulary's mean: the tokens of the data that it raises the most, without intervals."
    ]
    return Result("circuits_lens", table, source, notes=notes, keys=("rank", "token_id"))


def pair_table(
    circuits: dict[tuple[int, int], Circuit],
    tokenizer: Any,
    source: dict[str, Any],
    counts: Counts,
) -> Result:
    """The sources whose V_1 raises some logit the most, one output each."""
    rows = []
    for (layer, head), circuit in circuits.items():
        named = zip(circuit.sources, circuit.outputs, circuit.values, strict=True)
        for rank, (token, output, value) in enumerate(named, start=1):
            texts = (token_text(tokenizer, int(t)) for t in (token, output))
            rows.append((layer, head, rank, token, output, *texts, value))
    names = ["layer", "head", "rank", "source_id", "output_id", "source", "output", "effect"]
    table = pd.DataFrame(rows, columns=names).assign(**counts, flags="")
    notes = [
        "From weights alone: the logit that attending to a source with a gate of 1 adds to its "
        "best output, before the final norm's scale. Of each source the best output is listed."
    ]
    keys = ("rank", "source_id", "output_id")
    return Result("circuits_pairs", table, source, notes=notes, keys=keys)


# -- the summary -----------------------------------------------------------------------------------


def summary_of(
    heads: HeadAttribution,
    attribution: Attribution,
    repetition: Repetition,
    table: pd.DataFrame,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Headlines: the parts of the next token's logit, what V_1 has of it, what gates do."""
    sums = heads.sums
    n, total = sums["n"], sums["total"]
    by_part = {name: sums[name].sum(axis=(1, 2)) for name in ("v_first", "rest")}
    everything = np.stack((total, *by_part.values(), total - sum(by_part.values())), axis=1)
    named = ("total", "v_first", "rest_of_heads", "embedding_and_mlps")
    logit = ratio_interval(everything, n, **options)
    size = sums["v_first_size"].sum(axis=(1, 2))
    share = ratio_interval(size, size + sums["rest_size"].sum(axis=(1, 2)), **options)
    largest = np.argsort(-np.abs(table["dla_v_first"].to_numpy()), kind="stable")[:_NAMED]
    mixes = np.isin(table["layer"], heads.layers)
    first_n = sums["first_n"].sum()
    return {
        "logit": {name: interval_summary(logit, k) for k, name in enumerate(named)},
        "share": interval_summary(share),
        "largest_v_first": [
            {name: table.at[row, name] for name in ("layer", "head", "dla_v_first", "share")}
            for row in largest
            if mixes[row]
        ],
        **{name: _mean(table[name].to_numpy()) for name in ("copying", "copying_eigenvalues")},
        "repetition": {
            "n_sequences": repetition.n_sequences,
            "n_tokens_repeated": repetition.half,
            "uniform": repetition.uniform,
            "highest": {name: _highest(table, name) for name in SCORES},
            "nll": interval_summary(repetition.nll["on"]),
            "nll_gates_off": interval_summary(repetition.nll["off"]),
            "nll_gate_effect": interval_summary(repetition.nll["effect"]),
            "interval": repetition.nll["on"].protocol(),
        },
        "first_token": {
            "n": int(first_n),
            "total": float(divide(sums["first_total"].sum(), first_n)),
            "v_first": float(divide(sums["first_v_first"].sum(), first_n)),
        },
    }


def _mean(values: np.ndarray) -> float:
    """Over the heads that have it."""
    return float(divide(np.nansum(values), np.isfinite(values).sum()))


def _highest(table: pd.DataFrame, name: str) -> dict[str, Any]:
    row = table[name].idxmax()
    return {column: table.at[row, column] for column in ("layer", "head", name)}

"""The tables of a token view.

Shapes: N tokens shown, n channels (a head of a gate, or a source of a route).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from satlens.data.categories import NONE, UPOS
from satlens.data.tags import Tags
from satlens.data.token_text import Spelling, shown_tokens
from satlens.data.windows import Windows
from satlens.models.sites import AccessSite


def n_channels(site: AccessSite) -> int:
    """Numbers that a site has at each token."""
    return site.n_heads if site.kind == "gate" else len(site.sources)


def token_table(
    windows: Windows,
    tokenizer: Any,
    tags: Tags | None,
    nll: np.ndarray,
    intervened: np.ndarray | None,
) -> pd.DataFrame:
    """A row a token: where it is, its text and category, its losses (N,) in nats."""
    documents = windows.documents
    sizes = [len(document.tokens) for document in documents]
    tokens = np.concatenate([document.tokens for document in documents])
    position = np.concatenate([np.arange(size) for size in sizes])
    spelling = None if tokenizer is None else Spelling(tokenizer)
    texts = [
        text
        for document in documents
        for text in shown_tokens(
            None if spelling is None else spelling.pieces(document), document.tokens
        )
    ]
    special = np.isin(tokens, sorted(windows.special_ids))
    first = position % windows.n_ctx == 0
    columns: dict[str, Any] = {
        "document": np.repeat([document.id for document in documents], sizes),
        "position": position,
        "token": texts,
        "category": _tagged(tags, "category", len(tokens)),
        "upos": _tagged(tags, "upos", len(tokens)),
        "token_id": tokens,
        "nll": nll,
    }
    if intervened is not None:
        columns |= {"nll_intervened": intervened, "dnll": intervened - nll}
    flags = [
        ";".join(name for name, on in (("first", a), ("special", b)) if on)
        for a, b in zip(first, special, strict=True)
    ]
    n_scored = np.isfinite(nll).astype(np.int64)
    return pd.DataFrame({**columns, "n_documents": 1, "n_tokens": n_scored, "flags": flags})


def _tagged(tags: Tags | None, column: str, n: int) -> list[str]:
    """Names of the categories or tags of all tokens."""
    if tags is None:
        return [NONE] * n
    names = tags.categories.names if column == "category" else UPOS
    return [names[code] for document in tags.documents for code in getattr(document, column)]


def channel_table(
    sites: Sequence[AccessSite], values: np.ndarray, tokens: pd.DataFrame
) -> pd.DataFrame:
    """A row for each head of a gate and each source of a route, with its range over the tokens.

    Args:
        values: (N, n) of all sites side by side.
        tokens: the token table; rows without flags count for means.
    """
    rows = [
        (
            site,
            None if site.kind == "route" else k,
            "" if site.kind == "gate" else site.sources[k].label,
        )
        for site in sites
        for k in range(n_channels(site))
    ]
    counted = (tokens["flags"] == "").to_numpy()
    few = values[counted]
    none = np.full(len(rows), np.nan)
    low, high = values.min(0, initial=np.inf), values.max(0, initial=-np.inf)
    return pd.DataFrame(
        {
            "site": [site.name for site, _, _ in rows],
            "layer": np.array([site.layer for site, _, _ in rows], dtype=np.int64),
            "sublayer": [site.sublayer for site, _, _ in rows],
            "role": [site.role for site, _, _ in rows],
            "head": pd.array([head for _, head, _ in rows], dtype="Int64"),
            "kind": [site.kind for site, _, _ in rows],
            "source": [source for _, _, source in rows],
            "channel": [f"c{k}" for k in range(len(rows))],
            "mean": few.mean(0) if len(few) else none,
            "min": low,
            "max": high,
            "zero_fraction": (few == 0).mean(0) if len(few) else none,
            "varies": high > low,
            "n_documents": tokens["document"].nunique(),
            "n_tokens": int(counted.sum()),
            "flags": "",
        }
    )


def value_table(values: np.ndarray, channels: pd.DataFrame, tokens: pd.DataFrame) -> pd.DataFrame:
    places = tokens[["document", "position", "n_documents", "n_tokens", "flags"]]
    columns = pd.DataFrame(_float32(values), columns=list(channels["channel"]))
    return pd.concat([places, columns], axis=1)


def _float32(values: np.ndarray) -> np.ndarray:
    """Values rounded to float32 and written as the shortest decimals that mean it, as float64.

    What is not zero stays so.
    """
    single = values.astype(np.float32)
    smallest = np.copysign(np.finfo(np.float32).smallest_subnormal, values)
    single = np.where((single == 0) & (values != 0), smallest, single).astype(np.float32)
    return single.astype(str).astype(np.float64)

"""The token view: a text whose tokens are coloured by a gate, a route, a loss or a category.

Everything it shows is in the page: the numbers travel as float16 (losses as float32) in base64 and
a script colours the tokens with them. The CSV files keep every digit.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from markupsafe import Markup

from satlens.analysis.result import Result
from satlens.data.categories import DEFAULT_CATEGORIES
from satlens.errors import AnalysisError
from satlens.report.effects import Frame, count
from satlens.report.page.document import Fragment, asset, embedded_json, environment
from satlens.report.tokens.markup import token_markup
from satlens.report.tokens.shades import AMOUNTS, KINDS, SIGNED, fill_styles

NAME = "token_view"
PREFIX = "tv-"
MAX_BYTES = 4_200_000
"""Of base64 that one view may bring, so that its page stays below 5 MB."""
LOSSES = ("nll", "nll_intervened", "dnll")
PLACE = ("kind", "site", "layer", "sublayer", "role", "head", "source")


def token_fragment(result: Result, *, max_bytes: int = MAX_BYTES) -> Fragment:
    """The interactive view of a ``token_view`` result, to be put into a page.

    Args:
        result: from :func:`satlens.token_view`: its table, ``token_channels``, ``token_values``.
        max_bytes: of encoded numbers; when all tokens would need more, the first are shown and the
            view says so.

    Raises:
        AnalysisError: another kind of result, or parts that do not belong to its tokens.
    """
    if result.name != NAME:
        raise AnalysisError(f"result {result.name!r}: a token view is made of {NAME!r} only")
    channels = result.part("token_channels").table
    values = _values(result, channels)
    moving = channels["varies"].to_numpy(bool)
    n_shown = _n_shown(values[moving], max_bytes)
    tokens = result.table.iloc[:n_shown]
    template = environment().get_template("tokens.html.j2")
    html = template.render(
        lead=_lead(result),
        notes=_notes(result, n_shown),
        documents=_documents(tokens),
        losses=[name for name in LOSSES if name in tokens],
        payload=embedded_json(_payload(result, tokens, channels, values[:, :n_shown])),
    )
    styles = (asset("tokens.css") + fill_styles(PREFIX),)
    scripts = (asset("token_numbers.js"), asset("tokens.js"))
    return Fragment(html=Markup(html), styles=styles, scripts=scripts)


def _values(result: Result, channels: Frame) -> np.ndarray:
    """Numbers of every channel at every token, (channels, tokens)."""
    table, names = result.part("token_values").table, list(channels["channel"])
    keys = ["document", "position"]
    if missing := [name for name in (*keys, *names) if name not in table]:
        raise AnalysisError(f"result {NAME!r}: token_values lacks the column {missing[0]!r}")
    if not table[keys].equals(result.table[keys]):
        raise AnalysisError(f"result {NAME!r}: token_values and the table have different tokens")
    return table[names].to_numpy(float).T


def _n_shown(values: np.ndarray, max_bytes: int) -> int:
    """How many tokens fit; base64 makes four bytes of three."""
    per_token = (len(values) * float_width(values) + len(LOSSES) * 4) * 4 / 3
    return min(values.shape[1], max(1, int(max_bytes / per_token)))


# -- what the page says ----------------------------------------------------------------------------


def _lead(result: Result) -> str:
    """What a token view shows, in one or two sentences."""
    summary, n_documents = result.summary, len(set(result.table["document"]))
    counts = f"{count(len(result.table), 'token')} of {count(n_documents, 'document')}."
    if summary.get("nll") is None:
        return counts
    loss = f"{counts} Mean loss {summary['nll']:.4f} nats a token"
    if summary.get("nll_intervened") is None:
        return f"{loss}."
    return f"{loss}, {summary['nll_intervened']:.4f} under {summary['intervention']}."


def _notes(result: Result, n_shown: int) -> list[str]:
    notes = []
    if n_shown < len(result.table):
        notes.append(
            f"The first {n_shown:,} tokens are shown, so that the page stays small; the tables "
            f"have all {len(result.table):,}."
        )
    reasons: dict[str, list[str]] = {}
    for site, why in (result.summary.get("left_out") or {}).items():
        reasons.setdefault(why, []).append(site)
    return notes + [f"Not shown: {', '.join(s)} ({why})." for why, s in reasons.items()]


@dataclass(frozen=True)
class Token:
    """A token as the page shows it."""

    row: int
    html: Markup
    special: bool


def _documents(tokens: Frame) -> list[tuple[str, list[Token]]]:
    """Names and tokens of each run of rows of one document."""
    rows = zip(tokens["document"], tokens["token"], tokens["flags"], strict=True)
    shown = [
        (document, Token(row, token_markup(text), "special" in flags.split(";")))
        for row, (document, text, flags) in enumerate(rows)
    ]
    grouped = groupby(shown, key=lambda pair: pair[0])
    return [(document, [token for _, token in pairs]) for document, pairs in grouped]


# -- what the script reads -------------------------------------------------------------------------


def _payload(result: Result, tokens: Frame, channels: Frame, values: np.ndarray) -> dict[str, Any]:
    """Everything that the script needs, as JSON types."""
    moving = channels["varies"].to_numpy(bool)
    width = float_width(values[moving])
    wide = [name for name in LOSSES if name in tokens]
    return {
        "shades": {"amounts": AMOUNTS, "signed": SIGNED, "kinds": KINDS},
        "channels": _described(channels, values),
        "values": packed(values[moving], width),
        "width": width,
        "losses": {name: packed(tokens[name].to_numpy(float), 4) for name in wide},
        "means": {name: _number(result.table[name].mean()) for name in wide},
        "position": tokens["position"].tolist(),
        "token_id": tokens["token_id"].astype(int).tolist(),
        "category": _coded(tokens["category"], DEFAULT_CATEGORIES),
        "upos": _coded(tokens["upos"]),
    }


def _described(channels: Frame, values: np.ndarray) -> list[dict[str, Any]]:
    """A record a channel; ``constant`` is the value of one that is the same at every token."""
    records = []
    for k, row in enumerate(channels.to_dict("records")):
        place = {name: _plain(row.get(name)) for name in PLACE}
        record = {"id": row["channel"], **place, "mean": _number(row["mean"])}
        if not row["varies"]:
            record["constant"] = _number(values[k, 0])
        records.append(record)
    return records


def _plain(cell: Any) -> str | int | None:
    """Text or a whole number; None where the table has a gap."""
    if isinstance(cell, str):
        return cell
    return None if cell is None or cell != cell or not hasattr(cell, "__int__") else int(cell)


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _coded(column: Frame, first: Iterable[str] = ()) -> dict[str, Any]:
    """Names, those of ``first`` at their head, and each row's index among them."""
    found = set(column)
    names = [*(name for name in first if name in found), *sorted(found.difference(first))]
    codes = {name: code for code, name in enumerate(names)}
    return {"names": names, "codes": [codes[name] for name in column]}


def float_width(values: np.ndarray) -> int:
    """Bytes of the floats that hold the values: two, or four if one is too large for float16."""
    finite = np.abs(values[np.isfinite(values)])
    return 4 if finite.size and finite.max() > np.finfo(np.float16).max else 2


def packed(values: np.ndarray, width: int) -> str:
    """Little-endian floats of ``width`` bytes as base64.

    Zero stays zero, and what is not zero stays so too, however small.
    """
    kind = np.dtype(f"<f{width}")
    small = values.astype(kind)
    lost = (small == 0) & (values != 0)
    least = np.nextafter(kind.type(0), kind.type(1))
    small[lost] = np.copysign(least, values[lost])
    return base64.b64encode(small.tobytes()).decode("ascii")

from __future__ import annotations

import base64
import json
import math
import sys
import unicodedata
from html.parser import HTMLParser

import numpy as np
import pytest
from mock_tasks import token_result

from satlens.analysis.result import Result
from satlens.errors import AnalysisError
from satlens.report.page.document import document
from satlens.report.tokens.fragment import float_width, packed, token_fragment
from satlens.report.tokens.markup import token_markup
from satlens.report.tokens.shades import INK, fills

HOSTILE = ("<script>alert(1)</script>", "</script>", "<!--", "&lt;", "\u202e", '"><b>', "\u2028")


class Page(HTMLParser):
    """Elements, texts of tokens and the data of a fragment."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.tokens: dict[str, str] = {}
        self.data = ""
        self.marks: list[str] = []
        self._inside = ""
        self._token = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        found = dict(attrs)
        self.elements.append(tag)
        self._inside = "mark" if found.get("class") == "tv-mark" else tag
        if "data-token" in found:
            self._token = found["data-token"]
            self.tokens[self._token] = ""

    def handle_endtag(self, tag) -> None:
        self._inside = ""
        if tag == "span":
            self._token = ""

    def handle_data(self, data) -> None:
        if self._inside == "script":
            self.data += data
        elif self._inside == "mark":
            self.marks.append(data)
        elif self._token:
            self.tokens[self._token] += data


def payload(result: Result, **options) -> dict:
    return json.loads(Page(token_fragment(result, **options).html).data)


def numbers(text: str, width: int = 2) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), f"<f{width}").astype(float)


# -- numbers ---------------------------------------------------------------------------------------


def test_zero_stays_zero_and_nothing_else_becomes_it():
    values = np.array([0.0, -0.0, 1e-30, -1e-30, 6e-8, 0.1, -1.0, 65_504, np.nan])
    back = numbers(packed(values, 2))
    assert np.array_equal(back == 0, values == 0)
    assert np.array_equal(np.sign(back[2:-1]), np.sign(values[2:-1]))
    assert np.isnan(back[-1])


def test_numbers_of_usual_size_keep_eleven_bits():
    rng = np.random.default_rng(0)
    values = rng.choice([-1, 1], 10_000) * 10 ** rng.uniform(-4, 4.8, 10_000)
    back = numbers(packed(values, float_width(values)))
    assert np.abs(back / values - 1).max() <= 2**-11


def test_one_number_too_large_for_float16_makes_all_of_them_float32():
    values = np.array([65_505.0, 1e-30, np.inf])
    assert float_width(values) == 4
    assert np.allclose(numbers(packed(values, 4), 4), values, rtol=2**-23)
    assert float_width(np.array([np.nan, np.inf, 65_504.0])) == 2
    assert float_width(np.empty((0, 5))) == 2


def test_the_page_has_the_numbers_of_the_tables():
    result = token_result(n_layers=4, n_heads=3)
    data = payload(result)
    channels = result.part("token_channels").table
    table = result.part("token_values").table[list(channels["channel"])].to_numpy().T
    sent = numbers(data["values"], data["width"]).reshape(table.shape)
    assert np.allclose(sent, table, rtol=2**-11, atol=0)
    assert [c["id"] for c in data["channels"]] == list(channels["channel"])
    heads = channels["head"].astype(float).tolist()
    assert [math.nan if c["head"] is None else c["head"] for c in data["channels"]] == (
        pytest.approx(heads, nan_ok=True)
    )
    for name in ("nll", "nll_intervened", "dnll"):
        exact = result.table[name].to_numpy()
        assert np.allclose(numbers(data["losses"][name], 4), exact, rtol=2**-23, equal_nan=True)
        assert data["means"][name] == pytest.approx(np.nanmean(exact))
    named = data["category"]
    assert [named["names"][code] for code in named["codes"]] == list(result.table["category"])
    assert named["names"] == ["semantic", "functional"]


def test_a_channel_that_never_changes_travels_as_one_number():
    result = token_result()
    channels, values = (result.part(name) for name in ("token_channels", "token_values"))
    channels.table.loc[1, "varies"] = False
    values.table["c1"] = 0.25
    data = payload(result)
    assert [c.get("constant") for c in data["channels"][:3]] == [None, 0.25, None]
    n = len(result.table)
    sent = numbers(data["values"]).reshape(-1, n)
    assert len(sent) == len(channels.table) - 1
    assert np.allclose(sent[1], values.table["c2"], rtol=2**-11)


def test_without_an_intervention_no_change_is_offered():
    fragment = token_fragment(token_result(intervened=False))
    assert list(payload(token_result(intervened=False))["losses"]) == ["nll"]
    assert "intervened" not in Page(fragment.html).tokens
    assert 'data-field="dnll"' not in fragment.html


def test_a_model_without_gates_and_routes_has_its_losses_shown():
    result = token_result()
    none = result.part("token_channels").table.iloc[:0]
    values = result.part("token_values").table[
        ["document", "position", "n_documents", "n_tokens", "flags"]
    ]
    parts = (Result("token_channels", none), Result("token_values", values, keys=("position",)))
    bare = Result(
        "token_view", result.table, summary=result.summary, keys=("position",), parts=parts
    )
    data = payload(bare)
    assert data["channels"] == [] and data["values"] == ""
    assert len(numbers(data["losses"]["nll"], 4)) == len(result.table)


# -- size ------------------------------------------------------------------------------------------


def test_a_view_that_would_be_too_large_shows_its_first_tokens_and_says_so():
    result = token_result(texts=(tuple("abcdefgh") * 25,), n_layers=9, n_heads=8)
    whole, cut = token_fragment(result).html, token_fragment(result, max_bytes=20_000).html
    assert len(Page(whole).tokens) == 200 and "first" not in whole.split("<div")[2]
    page = Page(cut)
    assert 50 < len(page.tokens) < 200
    assert f"The first {len(page.tokens)} tokens are shown" in cut and "all 200" in cut
    data = json.loads(page.data)
    assert len(data["values"]) + sum(map(len, data["losses"].values())) <= 20_000
    moving = numbers(data["values"]).reshape(-1, len(page.tokens))
    exact = result.part("token_values").table["c0"].to_numpy()[: len(page.tokens)]
    assert np.allclose(moving[0], exact, rtol=2**-11)


def test_two_thousand_tokens_of_256_gates_stay_below_two_megabytes():
    result = token_result(texts=((" word",) * 2000,), n_layers=9, n_heads=32)
    fragment = token_fragment(result)
    page = document("t", fragment.html, fragment.styles, fragment.scripts)
    assert len(Page(fragment.html).tokens) == 2000
    assert len(page.encode()) < 2e6


# -- texts -----------------------------------------------------------------------------------------


def test_markup_in_tokens_and_documents_is_text():
    result = token_result(texts=(HOSTILE, ("a", "b")))
    result.table["document"] = result.table["document"].replace("d0", HOSTILE[0])
    values = result.part("token_values").table
    values["document"] = values["document"].replace("d0", HOSTILE[0])
    harmless = token_result(texts=(("a",) * len(HOSTILE), ("a", "b")))
    page, plain = (Page(token_fragment(each).html) for each in (result, harmless))
    shown = [tag for tag in page.elements if tag != "i"]
    assert shown == plain.elements
    assert page.tokens["0"] == HOSTILE[0] and page.tokens["1"] == "</script>"
    assert page.tokens["3"] == "&lt;" and page.tokens["4"] == ""


def test_nothing_invisible_reaches_the_page_but_line_breaks_and_tabs():
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    hidden = [chr(k) for k in range(sys.maxunicode + 1) if unicodedata.category(chr(k)) in kinds]
    passed = {char for char in hidden if char in token_markup(char)}
    assert {"\n", "\t"} <= passed
    # What is left are the number signs and verse ends of Arabic and Syriac, which are drawn.
    assert all(0x600 <= ord(char) <= 0x8E2 for char in passed - {"\n", "\t"})
    ignorable = "\u034f\u115f\u3164\ufe0f\uffa0\U000e0100"
    assert [char for char in ignorable if char in token_markup(char)] == []


@pytest.mark.parametrize(
    ("text", "shown", "marks"),
    [
        (" plain, text", " plain, text", []),
        ("a\nb", "a\nb", ["\u21b5"]),
        ("a\r\n", "a\n", ["CR", "\u21b5"]),
        ("x\u200by", "xy", ["ZWSP"]),
        ("\u202eabc\u202c", "abc", ["RLO", "PDF"]),
        ("\u00a0", "", ["NBSP"]),
        ("\x07", "", ["U+0007"]),
        ("\u05e9\u05dc", "\u05e9\u05dc", []),
        ("\u0301", "\u25cc\u0301", []),
        ("e\u0301", "e\u0301", []),
        ("\U0001f469\u200d\U0001f469", "\U0001f469\u200d\U0001f469", []),
        ("\u2764\ufe0f\u200d\U0001f525", "\u2764\ufe0f\u200d\U0001f525", []),
        ("\U0001f469\u200d", "\U0001f469", ["ZWJ"]),
        ("a\u200db", "ab", ["ZWJ"]),
        ("\ufe0f", "", ["VS16"]),
        ("\u2039F0\u203a\u20399F\u203a", "", ["\u2039F0\u203a\u20399F\u203a"]),
        ("\u2039F0\u203a said", "\u2039F0\u203a said", []),
        ("", "", ["\u2205"]),
    ],
)
def test_each_token_shows_what_it_consists_of(text, shown, marks):
    page = Page(f'<span data-token="0">{token_markup(text)}</span>')
    assert page.tokens["0"] == shown
    assert page.marks == marks


# -- colours ---------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2.2 defines it."""
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_can_be_read_on_every_fill(scheme):
    for name, fill in fills().items():
        low, high = sorted((luminance(fill[scheme]), luminance(INK[scheme])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name


def test_more_is_further_from_the_paper():
    amounts = [fill for name, fill in fills().items() if name[0] == "a"]
    light, dark = ([luminance(fill[k]) for fill in amounts] for k in (0, 1))
    assert light == sorted(light, reverse=True)
    assert dark == sorted(dark)
    assert len(set(amounts)) == len(amounts)


# -- what is refused -------------------------------------------------------------------------------


def test_other_results_are_refused():
    with pytest.raises(AnalysisError, match="token view is made of 'token_view' only"):
        token_fragment(token_result().part("token_channels"))


def test_parts_of_other_tokens_are_refused():
    result, other = token_result(), token_result(texts=(("a", "b"),))
    mixed = Result("token_view", result.table, keys=("position",), parts=other.parts)
    with pytest.raises(AnalysisError, match="token_values and the table have different tokens"):
        token_fragment(mixed)
    values = result.part("token_values")
    values.table = values.table.drop(columns="c2")
    with pytest.raises(AnalysisError, match="token_values lacks the column 'c2'"):
        token_fragment(result)

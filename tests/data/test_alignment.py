from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from satlens.data.alignment import align, byte_alphabet, token_offsets
from satlens.data.tokenizers import decode, encode, encode_with_offsets, train_bpe
from satlens.data.wordlist import tag_words
from satlens.errors import DataError

TOKENIZER = train_bpe(["the cat — “sat” on café 日本 😀 the  mat\n\nand don't"] * 5, 320)

# Letters, punctuation and everything that has misaligned other tools.
ALPHABET = "abT19 .,'-—“”‘’\n\t\r\u00a0\u200b\u200d\u0301\ufe0f\u3000\u2028日本한é😀👩🏽🇫ß\x85"
texts = st.text(st.sampled_from(ALPHABET), min_size=1, max_size=40)


def oracle(text, subwords, starts, ends):
    """The rule of the module, word for word, one character at a time."""
    answers = []
    for begin, stop in subwords:
        visible = [p for p in range(begin, stop) if not text[p].isspace()]
        places = range(visible[0], stop) if visible else range(begin, stop)
        overlaps = [sum(a <= p < b for p in places) for a, b in zip(starts, ends, strict=True)]
        if max(overlaps, default=0) > 0:
            answers.append(overlaps.index(max(overlaps)))
        elif not visible and begin < stop:
            later = [k for k, a in enumerate(starts) if a >= stop]
            answers.append(later[0] if later else -1)
        else:
            answers.append(-1)
    return answers


def aligned(text, words):
    """Words of each subword, for words given by their spans."""
    ((ids, offsets),) = encode_with_offsets(TOKENIZER, [text])
    starts, ends = (np.array(c, dtype=np.int64) for c in zip(*words, strict=True))
    found = align(text, offsets, starts, ends)
    return [text[a:b] for a, b in offsets.tolist()], found.tolist(), ids


@st.composite
def text_and_spans(draw):
    """A text with random disjoint words and random subwords, empty ones included."""
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    words = [(a, b) for a, b in pairs if a < b]
    spans = draw(
        st.lists(st.tuples(st.integers(0, len(text)), st.integers(0, 6)), min_size=1, max_size=12)
    )
    subwords = [(a, min(len(text), a + n)) for a, n in spans]
    return text, words, subwords


@given(text_and_spans())
@settings(max_examples=300, deadline=None)
def test_any_spans_follow_the_rule(case):
    text, words, subwords = case
    starts = np.array([a for a, _ in words], dtype=np.int64)
    ends = np.array([b for _, b in words], dtype=np.int64)
    found = align(text, np.array(subwords).reshape(-1, 2), starts, ends)
    assert found.dtype == np.int32
    assert found.tolist() == oracle(text, subwords, starts.tolist(), ends.tolist())


@given(texts)
@example("a  b")
@example("e\u0301 \u200b👩🏽\u200d")
@settings(max_examples=300, deadline=None)
def test_subwords_of_real_text(text):
    ((ids, offsets),) = encode_with_offsets(TOKENIZER, [text])
    starts, ends, _ = tag_words(text)
    found = align(text, offsets, np.array(starts, dtype=int), np.array(ends, dtype=int)).tolist()
    assert len(found) == len(ids)  # counts conserve
    assert found == oracle(text, offsets.tolist(), starts, ends)
    known = {}
    for span, word in zip(map(tuple, offsets.tolist()), found, strict=True):
        assert known.setdefault(span, word) == word  # bytes of one character share a word


def test_leading_space_belongs_to_the_word_that_follows():
    pieces, found, _ = aligned("a 한 the", [(0, 1), (2, 3), (4, 7)])
    assert pieces == ["a", " ", "한", "한", "한", " the"]
    assert found == [0, 1, 1, 1, 1, 2]
    # One blank is a word of its own (as spaCy has it), the other leads "the".
    pieces, found, _ = aligned("a  the", [(0, 1), (2, 3), (3, 6)])
    assert pieces == ["a", " ", " the"]
    assert found == [0, 1, 2]


def test_largest_overlap_and_first_on_ties():
    spans = np.array([[0, 5], [0, 4], [1, 3], [0, 6]])
    found = align("abcdef", spans, np.array([0, 2, 5]), np.array([2, 5, 6]))
    assert found.tolist() == [1, 0, 0, 1]


def test_no_overlap_is_none():
    spans = np.array([[2, 3], [3, 4], [4, 4], [0, 0]])
    found = align("ab-\n", spans, np.array([0]), np.array([2]))
    assert found.tolist() == [-1, -1, -1, -1]
    nothing = np.array([], dtype=int)
    assert align("ab", np.array([[0, 2]]), nothing, nothing).tolist() == [-1]
    assert align("", np.zeros((0, 2), dtype=int), nothing, nothing).tolist() == []


# -- tokens that are not the encoding of their text ----------------------------------------------


def test_byte_alphabet_is_that_of_the_library():
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    write = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    codes = [c for c in (*range(0x800), *range(0x800, 0x110000, 997)) if not 0xD800 <= c < 0xE000]
    for character in map(chr, codes):
        ((name, _),) = write.pre_tokenize_str(character)
        assert bytes(alphabet[c] for c in name) == character.encode()


@given(texts, st.data())
@settings(deadline=None)
def test_any_spelling_of_a_text_has_offsets(text, data):
    """One token a byte: offsets are those of the bytes' characters."""
    name_of = {b: c for c, b in byte_alphabet().items()}
    raw = text.encode()
    tokens = np.array([TOKENIZER.token_to_id(name_of[b]) for b in raw])
    offsets = token_offsets("d", text, tokens, TOKENIZER)
    owners = [k for k, c in enumerate(text) for _ in c.encode()]
    assert offsets.tolist() == [[k, k + 1] for k in owners]
    # Cut anywhere, even inside a character: the text is what the tokens decode to.
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(raw))] * 2)))
    if low < high:
        piece = decode(TOKENIZER, tokens[low:high])
        offsets = token_offsets("d", piece, tokens[low:high], TOKENIZER)
        assert len(offsets) == high - low
        assert (offsets[:, 1] > offsets[:, 0]).all()
        assert offsets[0, 0] == 0
        assert offsets[:, 1].max() == len(piece)


def test_beginning_of_an_encoding_and_special_tokens():
    text = "the cat sat on the mat"
    (ids,) = encode(TOKENIZER, [text])
    whole = token_offsets("d", text, ids, TOKENIZER)
    assert np.array_equal(token_offsets("d", text, ids[:3], TOKENIZER), whole[:3])
    joined = np.concatenate([ids[:2], [0], ids[:2]])
    offsets = token_offsets("d", decode(TOKENIZER, joined), joined, TOKENIZER)
    assert offsets[2].tolist() == [whole[1, 1], whole[1, 1] + len("<|endoftext|>")]


def test_tokens_must_spell_the_text():
    (ids,) = encode(TOKENIZER, ["the cat"])
    with pytest.raises(DataError, match="'d': tokens: do not spell"):
        token_offsets("d", "a dog", ids, TOKENIZER)
    with pytest.raises(DataError, match="'d': text: none to tag"):
        token_offsets("d", "", ids, TOKENIZER)
    with pytest.raises(DataError, match="do not spell"):
        token_offsets("d", "the cat", np.array([10**6]), TOKENIZER)

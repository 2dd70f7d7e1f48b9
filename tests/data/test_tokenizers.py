from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from satlens.data.tokenizers import (
    backend,
    decode,
    encode,
    encode_with_offsets,
    end_id,
    fingerprint,
    load_tokenizer,
    special_ids,
    train_bpe,
    vocab_size,
)
from satlens.errors import DataError

TEXTS = ["the cat sat on the mat, the cat ran", "a café — “naïve” 日本 😀", "don't stop the cat"]
TOKENIZER = train_bpe(TEXTS * 3, 300)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def test_layout():
    assert special_ids(TOKENIZER) == {0}
    assert end_id(TOKENIZER) == 0
    assert vocab_size(TOKENIZER) == 300
    assert TOKENIZER.id_to_token(0) == "<|endoftext|>"


def test_vocabulary_must_hold_the_bytes():
    with pytest.raises(DataError, match="vocab_size"):
        train_bpe(TEXTS, 256)


@given(any_text)
@settings(deadline=None)
def test_round_trip_and_offsets(text):
    ((ids, offsets),) = encode_with_offsets(TOKENIZER, [text])
    assert decode(TOKENIZER, ids) == text
    assert not set(ids.tolist()) & special_ids(TOKENIZER)
    # Offsets are in characters, in order, and cover the text without a gap.
    reached = 0
    for start, end in offsets.tolist():
        assert start <= reached
        assert start < end
        reached = max(reached, end)
    assert reached == len(text)


def test_offsets_hold_leading_spaces_and_split_characters():
    ((ids, offsets),) = encode_with_offsets(TOKENIZER, ["on the 한"])
    spans = ["on the 한"[a:b] for a, b in offsets.tolist()]
    assert " the" in spans
    assert spans.count("한") == 3  # three bytes, each the whole character
    assert len(ids) == len(offsets)


def test_special_token_spelt_out_is_text():
    (ids,) = encode(TOKENIZER, ["a<|endoftext|>b"])
    assert 0 not in ids
    assert decode(TOKENIZER, ids) == "a<|endoftext|>b"


def test_fingerprint_ignores_runtime_settings_and_sees_content(tmp_path):
    other = train_bpe(TEXTS * 3, 300)
    assert fingerprint(other) == fingerprint(TOKENIZER)
    other.enable_truncation(4)
    other.enable_padding()
    assert fingerprint(other) == fingerprint(TOKENIZER)
    other.save(str(tmp_path / "tokenizer.json"))
    read = load_tokenizer(tmp_path)
    assert fingerprint(read) == fingerprint(TOKENIZER)
    assert len(encode(read, [TEXTS[0]])[0]) > 4
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert fingerprint(load_tokenizer(tmp_path)) == fingerprint(TOKENIZER)
    assert fingerprint(train_bpe(TEXTS * 3, 299)) != fingerprint(TOKENIZER)


def test_training_does_not_depend_on_process_or_threads():
    code = (
        f"from satlens.data.tokenizers import *\nprint(fingerprint(train_bpe({TEXTS!r} * 3, 300)))"
    )
    for threads, seed in (("1", "1"), ("4", "2")):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == fingerprint(TOKENIZER)


def test_hugging_face_fast_tokenizer_is_accepted():
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER)
    assert fingerprint(fast) == fingerprint(TOKENIZER)
    assert np.array_equal(encode(fast, [TEXTS[1]])[0], encode(TOKENIZER, [TEXTS[1]])[0])
    with pytest.raises(DataError, match="not a fast tokenizer"):
        backend(object())


@pytest.mark.parametrize("content", [b"", b"{}", b"[1", b"\xff\xfe", b'{"model": 3}'])
def test_damaged_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(path)
    with pytest.raises(DataError, match="none"):
        load_tokenizer(tmp_path / "none")


def test_tokenizer_without_an_end_token():
    from tokenizers import Tokenizer, models

    with pytest.raises(DataError, match="end-of-document"):
        end_id(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))

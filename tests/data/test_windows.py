from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from satlens.data.corpora import read_corpus
from satlens.data.dataset import DocumentTokens, PreparedDataset
from satlens.data.tokenizers import train_bpe
from satlens.data.windows import Windows, as_documents, split_taken, tokens_per_document
from satlens.errors import DataError

token_lists = st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=40), min_size=1)


def documents_of(lists):
    return [DocumentTokens(str(k), None, np.array(t), "") for k, t in enumerate(lists)]


# -- the partition -------------------------------------------------------------------------------


def test_a_worked_example():
    (batch,) = Windows(documents_of([[1, 2, 3, 4, 5, 6], [7, 0, 8]]), n_ctx=3)
    assert batch.tokens.tolist() == [[1, 2, 3], [4, 5, 0], [7, 0, 0]]
    assert batch.targets.tolist() == [[2, 3, 4], [5, 6, -100], [0, 8, -100]]
    assert batch.document.tolist() == [0, 0, 1]
    assert batch.start.tolist() == [0, 3, 0]
    assert batch.valid.tolist() == [[True] * 3, [True, True, False], [True, True, False]]
    assert batch.first.tolist() == [[True, False, False]] * 3
    (batch,) = Windows(documents_of([[7, 0, 8]]), n_ctx=3, special_ids=frozenset({0}))
    assert batch.targets.tolist() == [[-100, 8]]
    assert batch.valid.tolist() == [[True, False]]


@given(token_lists, st.integers(1, 9), st.integers(1, 5), st.frozensets(st.integers(0, 3)))
@settings(deadline=None)
def test_every_token_but_the_first_is_scored_once(lists, n_ctx, batch_size, special):
    documents = documents_of(lists)
    if all(len(tokens) < 2 for tokens in lists):
        with pytest.raises(DataError, match="nothing to score"):
            Windows(documents, n_ctx, batch_size, special)
        return
    windows = Windows(documents, n_ctx, batch_size, special)
    scored = {}
    for k, batch in enumerate(windows):
        assert batch.index == k
        assert batch.tokens.shape[1] <= n_ctx
        assert batch.tokens.shape[0] <= batch_size
        for row, column in torch.nonzero(batch.targets != -100).tolist():
            document = windows.documents[int(batch.document[row])]
            position = int(batch.start[row]) + column
            assert batch.tokens[row, column] == document.tokens[position]
            assert batch.targets[row, column] == document.tokens[position + 1]
            key = (document.id, position + 1)
            assert key not in scored
            scored[key] = int(batch.targets[row, column])
        inputs = batch.tokens[batch.valid]
        assert not set(inputs.tolist()) & special
    expected = {
        (str(d), t): token
        for d, tokens in enumerate(lists)
        for t, token in enumerate(tokens)
        if t > 0 and token not in special
    }
    assert scored == expected
    assert windows.n_tokens == len(expected)
    assert windows.n_skipped == sum(len(t) == 1 for t in lists)
    assert windows.n_documents + windows.n_skipped == len(lists)
    assert windows.n_special == sum(t in special for x in lists if len(x) > 1 for t in x)


def test_rows_do_not_depend_on_batch_size():
    documents = documents_of([list(range(50)), [1, 2], list(range(7))])

    def rows(batch_size):
        return [
            (int(d), int(s), [x for x in t.tolist() if x != -100])
            for batch in Windows(documents, 8, batch_size)
            for d, s, t in zip(batch.document, batch.start, batch.targets, strict=True)
        ]

    assert rows(1) == rows(3) == rows(64)


def test_resume_and_share():
    windows = Windows(documents_of([list(range(50))]), 4, 2)
    assert [b.index for b in windows.iter_from(3)] == list(range(3, len(windows)))
    shares = [b.index for part in range(3) for b in windows.iter_from(part, 3)]
    assert sorted(shares) == list(range(len(windows)))
    assert torch.equal(next(windows.iter_from(3)).tokens, list(windows)[3].tokens)
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_identity_is_that_of_the_tokens():
    lists = [[1, 2, 3], [4, 5]]
    digest = Windows(documents_of(lists), 2).sha256
    assert digest == Windows(documents_of(lists), 3, 1).sha256
    assert digest != Windows(documents_of([[1, 2, 3], [4, 6]]), 2).sha256
    assert digest != Windows(documents_of([[1, 2], [3, 4, 5]]), 2).sha256
    assert digest != Windows(documents_of(lists), 2, max_tokens_per_document=2).sha256


def test_slices():
    documents = documents_of([list(range(n)) for n in (5, 9, 2, 30, 7, 7)])
    some = Windows(documents, 4, max_documents=3, max_tokens_per_document=6)
    assert some.n_documents == 3
    order = [int(d.id) for d in some.documents]
    assert order == sorted(order)
    assert max(len(d.tokens) for d in some.documents) <= 6
    # A sample by id: it does not depend on the order in which documents come.
    reverse = Windows(documents[::-1], 4, max_documents=3)
    assert {d.id for d in reverse.documents} == {d.id for d in some.documents}
    assert Windows(documents, 4, max_documents=99).n_documents == 6


@given(token_lists, st.integers(1, 500))
def test_budget_is_spread_over_documents(lists, budget):
    documents = documents_of(lists)
    cap = tokens_per_document(documents, budget)

    def targets(cap):
        return sum(max(0, min(len(t), cap) - 1) for t in lists)

    assert cap == 2 or targets(cap) <= budget
    assert cap >= max(map(len, lists)) or targets(cap + 1) > budget


def test_refusals():
    with pytest.raises(DataError, match="nothing to score in 0 documents"):
        Windows([], 4)
    with pytest.raises(DataError, match="document '1': no tokens"):
        Windows(documents_of([[1, 2], []]), 4)
    with pytest.raises(DataError, match="document '1': token id 9 outside the vocabulary of 9"):
        Windows(documents_of([[1, 2], [3, 9]]), 4, d_vocab=9)
    for option in ("n_ctx", "batch_size", "max_documents", "max_tokens_per_document"):
        with pytest.raises(DataError, match=f"{option}: must be positive"):
            Windows(documents_of([[1, 2]] * 3), **{"n_ctx": 4, option: 0})


# -- what may be passed as data ------------------------------------------------------------------

TOKENIZER = train_bpe(["the cat sat on the mat"], 270)


def tokens_of(documents):
    return [d.tokens.tolist() for d in documents]


def test_tokens_in_every_form():
    rows = [[1, 2, 3], [4, 5, 6]]
    for data in (
        rows,
        torch.tensor(rows),
        np.array(rows, dtype=np.uint16),
        [torch.tensor(rows[0])],
    ):
        assert tokens_of(as_documents(data)) == rows[: len(data)]
    assert tokens_of(as_documents(torch.tensor([1, 2]))) == [[1, 2]]
    assert as_documents(rows)[0].text == ""
    assert as_documents([TOKENIZER.encode("a cat").ids], TOKENIZER)[0].text == "a cat"


def test_texts_in_every_form(tmp_path):
    text = "the cat 😀"
    (expected,) = as_documents(text, TOKENIZER)
    assert expected.text == text
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text('{"text": "the cat 😀"}')
    for data in ([text], tmp_path / "a.txt", str(tmp_path / "a.txt"), tmp_path / "a.jsonl"):
        assert tokens_of(as_documents(data, TOKENIZER)) == [expected.tokens.tolist()]
    assert len(as_documents([text, "dog", "x"], TOKENIZER)) == 3
    assert len(as_documents("long " * 2000, TOKENIZER)) == 1


def test_prepared_data(prepared):
    expected = prepared.split("val").documents
    for data in (prepared, prepared.path, str(prepared.path)):
        found = as_documents(data, prepared.tokenizer, "val")
        assert [d.id for d in found] == [d.id for d in expected]
        assert tokens_of(found) == tokens_of(expected)
    with pytest.raises(DataError, match="tokenizer: "):
        as_documents(prepared, TOKENIZER)
    assert PreparedDataset.open(prepared.path).special_ids == {0}


def test_embedded_corpus_gives_its_split():
    documents = as_documents("sotu", TOKENIZER, "val")
    known = {d.id: d for d in read_corpus("sotu")}
    assert len(documents) == 22
    assert all(known[d.id].cluster == d.cluster for d in documents)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ("", "data: empty document"),
        (" \n", "data: empty document"),
        ("a\0b", "data: NUL"),
        ("a\ud800", "data: lone surrogate"),
        ([], "data: no documents"),
        (["a", ""], r"data\[1\]: empty document"),
        ([[1], []], r"data\[1\].*no tokens"),
        ([[1], "a"], r"data\[1\]: a text among"),
        ([[1.5]], r"data\[0\].*float"),
        ([[[1]]], r"data\[0\]"),
        ([None], r"data\[0\]"),
        (torch.zeros(2, 3), "tokens must be integers"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), "tokens must be integers"),
        (torch.zeros(0, 3, dtype=torch.int64), "tokens must be integers"),
        (7, "data: int is not"),
        ("missing.txt", "no such file"),
        ("missing/file.jsonl.gz", "no such file"),
        ("runs/tiny/dat", "^runs/tiny/dat: no such file or folder$"),
        (r"runs\tiny", "no such file or folder"),
        ("corpus.cvs", "no such file or folder"),
        ("runs/" + "x" * 5000, "no such file or folder"),
        ("stou", "'stou' is no file or folder, and a text needs at least two words"),
    ],
)
def test_bad_data(data, part):
    with pytest.raises(DataError, match=part):
        as_documents(data, TOKENIZER)


def test_an_empty_file_is_named(tmp_path):
    path = tmp_path / "none.jsonl"
    path.write_text("\n")
    with pytest.raises(DataError, match=r"none\.jsonl: no documents"):
        as_documents(path)


def test_text_without_a_tokenizer():
    with pytest.raises(DataError, match="needs a tokenizer"):
        as_documents("some text")


def test_token_ids_from_a_npy_file_equal_the_array(tmp_path):
    ids = np.arange(12).reshape(2, 6)
    np.save(tmp_path / "ids.npy", ids)
    read = as_documents(str(tmp_path / "ids.npy"))
    assert [d.tokens.tolist() for d in read] == ids.tolist()

    pickled = tmp_path / "pickled.npy"
    np.save(pickled, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"pickled\.npy: not a plain \.npy array"):
        as_documents(pickled)
    with pytest.raises(DataError, match=r"absent\.npy: no such file"):
        as_documents("absent.npy")
    with pytest.raises(DataError, match=r"absent\.npy: cannot be read"):
        as_documents(tmp_path / "absent.npy")


def test_one_word_is_a_text_in_a_list_or_a_file(tmp_path):
    (tmp_path / "a.txt").write_text("cat")
    expected = tokens_of(as_documents(["cat"], TOKENIZER))
    assert tokens_of(as_documents(tmp_path / "a.txt", TOKENIZER)) == expected


def test_only_data_with_splits_has_a_split_taken(prepared, tmp_path):
    (tmp_path / "a.txt").write_text("the cat")
    for data in (prepared, prepared.path, str(prepared.path), "sotu"):
        assert split_taken(data, "val") == "val"
    for data in ([[1, 2]], torch.ones(2, 3), "the cat", tmp_path / "a.txt", ["a", "b"]):
        assert split_taken(data, "val") is None

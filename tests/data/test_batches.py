from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from satlens.data.batches import TrainBatches
from satlens.data.dataset import Split
from satlens.data.shards import Shard
from satlens.errors import DataError

END = 0


def split_of(lists):
    tokens = np.concatenate([np.array(t, dtype=np.uint16) for t in lists])
    ends = np.cumsum([len(t) for t in lists])
    return Split("train", Shard(tokens, ends), [Path("none")], END)


def numbered(lengths):
    """Documents whose token ids are all different (from 1 on)."""
    ends = np.cumsum(lengths)
    return [
        list(range(end - n + 1, end + 1)) for n, end in zip(lengths, ends.tolist(), strict=True)
    ]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(lengths, st.integers(1, 10), st.integers(0, 5))
@settings(deadline=None)
def test_an_epoch_has_every_token_once_as_target(lengths, n_ctx, seed):
    lists = numbered(lengths)
    batches = TrainBatches(split_of(lists), n_ctx, 1, seed)
    owner = {token: k for k, tokens in enumerate(lists) for token in tokens}
    following = {a: b for tokens in lists for a, b in zip(tokens, [*tokens[1:], END], strict=True)}
    for epoch in range(2):
        seen = Counter()
        for k in range(batches.chunks_per_epoch):
            inputs, targets, documents = batches.batch(epoch * batches.chunks_per_epoch + k)
            assert inputs.shape == targets.shape == documents.shape == (1, n_ctx)
            scored = targets[0] != -100
            assert torch.equal(scored, documents[0] >= 0)
            row = (inputs[0][scored], targets[0][scored], documents[0][scored])
            previous = None
            for token, target, document in zip(*(x.tolist() for x in row), strict=True):
                seen[target] += 1
                if token != END:
                    assert following[token] == target
                    assert owner[token] == document
                elif previous is not None:
                    assert document == previous  # an end token belongs to what it ends
                previous = document
        assert seen.pop(END) == len(lists)
        assert seen == dict.fromkeys(owner, 1)
    assert batches.targets_per_epoch == sum(lengths) + len(lists)


@given(lengths, st.integers(1, 10), st.integers(1, 4), st.integers(0, 40))
@settings(deadline=None)
def test_a_batch_depends_on_seed_and_step_alone(lengths, n_ctx, batch_size, step):
    split = split_of(numbered(lengths))
    used = TrainBatches(split, n_ctx, batch_size, 1)
    for other in (0, step + 7, 3, step):
        used.batch(other)
    assert same(used.batch(step), TrainBatches(split, n_ctx, batch_size, 1).batch(step))


def test_rows_do_not_depend_on_batch_size():
    split = split_of(numbered([40, 7, 19, 1, 33]))
    single = TrainBatches(split, 8, 1, 3)
    wide = TrainBatches(split, 8, 6, 3)  # 14 chunks an epoch: batches cross the border
    for step in range(10):
        parts = [single.batch(step * 6 + k) for k in range(6)]
        rows = [torch.cat(column) for column in zip(*parts, strict=True)]
        assert same(wide.batch(step), rows)


@given(lengths, st.integers(1, 10), st.integers(1, 9), st.integers(0, 60))
@settings(deadline=None)
def test_scored_targets_are_known_without_reading(lengths, n_ctx, batch_size, number):
    split = split_of(numbered(lengths))
    found = TrainBatches(split, n_ctx, batch_size, 1).scored(number)
    batch = TrainBatches(split, n_ctx, batch_size, 1).batch(number)
    assert found == int((batch.targets >= 0).sum())


def test_epochs_and_seeds_shuffle():
    split = split_of(numbered([40, 7, 19, 1, 33] * 4))

    def epoch(seed, number):
        batches = TrainBatches(split, 8, 1, seed)
        n = batches.chunks_per_epoch
        return torch.cat([batches.batch(number * n + k).targets for k in range(n)]).tolist()

    assert epoch(0, 0) == epoch(0, 0)
    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) != epoch(1, 0)
    # The packing changes too, not only the order of chunks.
    assert sorted(map(tuple, epoch(0, 0))) != sorted(map(tuple, epoch(0, 1)))


def test_chunks_overlap_by_one_token():
    batches = TrainBatches(split_of(numbered([100])), 10, 1, 0)
    chunks = [batches.batch(k) for k in range(batches.chunks_per_epoch)]
    chunks.sort(key=lambda chunk: int(chunk.targets[0, 0]) or 10**6)
    for a, b in pairwise(chunks):
        assert a.targets[0, -1] == b.inputs[0, 0]


def test_on_prepared_data(prepared):
    split = prepared.split("train")
    batches = TrainBatches(split, 16, 4, 0)
    batch = batches.batch(0)
    texts = {k: d.tokens.tolist() for k, d in enumerate(split.documents)}
    for row, owners in zip(batch.inputs.tolist(), batch.documents.tolist(), strict=True):
        for k in set(owners) & texts.keys():
            piece = [t for t, owner in zip(row, owners, strict=True) if owner == k]
            whole = [*texts[k], END]
            assert any(
                whole[i : i + len(piece)] == piece for i in range(len(whole) - len(piece) + 1)
            )


@pytest.mark.parametrize("option", ["n_ctx", "batch_size"])
def test_sizes_must_be_positive(option):
    with pytest.raises(DataError, match=option):
        TrainBatches(split_of([[1]]), **{"n_ctx": 4, "batch_size": 1, "seed": 0, option: 0})

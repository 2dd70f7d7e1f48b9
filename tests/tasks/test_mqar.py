"""Associative recall: the answer stands in the context, and nothing else gives it away."""

from __future__ import annotations

import math
import re

import pytest

from satlens.tasks.mqar import KEYS, VALUES, recall_rows
from satlens.tasks.suite import MAX_PAIRS


@pytest.mark.parametrize("n_pairs", [2, 8, MAX_PAIRS])
def test_each_key_has_one_value_in_its_context_and_it_is_the_right_choice(n_pairs):
    rows = recall_rows(n_pairs, seed=3, n_contexts=12)
    assert len(rows) == 12 * min(4, n_pairs)
    for row in rows:
        pairs = dict(re.findall(r"(\w+): (\w+)\.", row["context"]))
        assert len(pairs) == len(set(row["choices"])) == n_pairs
        assert list(pairs.values()) == row["choices"]
        assert row["choices"][row["label"]] == pairs[row["query"]]


def test_questions_on_one_context_ask_for_different_keys():
    by_context: dict[str, list] = {}
    for row in recall_rows(8):
        by_context.setdefault(row["context_id"], []).append(row)
    assert len(by_context) == 64
    for rows in by_context.values():
        assert len({row["context"] for row in rows}) == 1
        assert len({row["query"] for row in rows}) == 4


def test_no_word_gives_another_away():
    assert len(KEYS) == len(VALUES) == MAX_PAIRS == len(set(KEYS)) == len(set(VALUES))
    for value in VALUES:
        others = [w for w in (*KEYS, *VALUES) if w.startswith(value)]
        assert others == [value]


@pytest.mark.parametrize("guess", ["first", "last", "shortest", "alphabetical"])
def test_habits_score_chance(guess):
    pick = {
        "first": lambda choices: choices[0],
        "last": lambda choices: choices[-1],
        "shortest": lambda choices: min(choices, key=len),
        "alphabetical": min,
    }[guess]
    rows = recall_rows(8, seed=5, n_contexts=1000)
    right = sum(pick(row["choices"]) == row["choices"][row["label"]] for row in rows)
    # Four questions a context share its guess; of eight places at most one is right.
    sd = math.sqrt(1 / 8 * 7 / 8 / len(rows))
    assert abs(right / len(rows) - 1 / 8) < 4 * sd


def test_the_seed_makes_the_rows():
    assert recall_rows(8, seed=1) == recall_rows(8, seed=1) != recall_rows(8, seed=2)


def test_the_default_rows_stay_what_they_are():
    first = recall_rows(8)[0]
    assert first["context"].startswith("drum: flour. bus: smoke. leaf: dust.")
    assert (first["query"], first["choices"][first["label"]]) == ("cat", "iron")


@pytest.mark.parametrize("n_pairs", [1, MAX_PAIRS + 1])
def test_impossible_numbers_of_pairs_are_refused(n_pairs):
    with pytest.raises(ValueError, match="between 2 and 64"):
        recall_rows(n_pairs)

"""Multi-query associative recall as text: the task that needs no data.

A context lists pairs of words; each question repeats one key, and the model should give its value::

    hat: moon. cup: fern. saw: pond. cup:   ->   fern

Arora et al. (arXiv:2312.04927) train on pairs of token ids and put all queries of a context in one
sequence. Here pairs are short English words, so that any tokenizer can read them, each query is a
question of its own (a context is a passage with several questions), and the model chooses among
the values of its context. Values are dealt to keys at random and keys are asked for at random, so
whoever does not look the key up, whatever else they go by, scores 1 / pairs on average; a few
contexts stray from it as any sample does.
"""

from __future__ import annotations

import random
from typing import Any

from satlens.tasks.suite import MAX_PAIRS

VERSION = "1"
N_CONTEXTS = 64
N_QUERIES = 4

# No value begins another value or a key: a model cannot score on two answers with one token.
_KEYS = """ant arm bag bat bed bee bell bird boat bone book boot bowl box bus cake can cap car cat
    chair clock coat cow cup desk dog door drum duck ear egg eye fan fish flag foot fork fox frog
    gate gun hat hen horse jar key king kite knee lamp leaf leg lid map milk mouse nail neck nest
    net nose pen pig"""
_VALUES = """apple beach blue brick brown cave chalk city clay cloud coal coin cotton cream dawn
    dust field fire flame flour forest garden glass gold grass green hill honey ice iron island
    lake lemon linen market meadow mill moon night oak orange paper pearl pink plum pond purple
    rain red river road rose salt sand silk silver sky smoke snow steel stone storm tower white"""
KEYS = tuple(_KEYS.split())
VALUES = tuple(_VALUES.split())


def recall_rows(
    n_pairs: int, seed: int = 0, n_contexts: int = N_CONTEXTS, n_queries: int = N_QUERIES
) -> list[dict[str, Any]]:
    """Questions of associative recall, context by context.

    Args:
        n_pairs: pairs in a context, 2 to 64: chance is ``1 / n_pairs``.
        seed: of the words, their pairing and the queries.
        n_contexts: contexts.
        n_queries: questions a context, of different keys; at most ``n_pairs`` of them.

    Returns:
        a row a question: ``context``, ``query`` (a key), ``choices`` (the values of the context, in
        its order), ``label`` (index of the right one) and ``context_id``.
    """
    if not 2 <= n_pairs <= MAX_PAIRS:
        raise ValueError(f"n_pairs must be between 2 and {MAX_PAIRS}")
    dice = random.Random(f"mqar {n_pairs} {seed}")
    made = []
    for number in range(n_contexts):
        keys = dice.sample(KEYS, n_pairs)
        values = dice.sample(VALUES, n_pairs)
        context = " ".join(f"{key}: {value}." for key, value in zip(keys, values, strict=True))
        for place in dice.sample(range(n_pairs), min(n_queries, n_pairs)):
            made.append(
                {
                    "context": context,
                    "query": keys[place],
                    "choices": values,
                    "label": place,
                    "context_id": f"context {number}",
                }
            )
    return made

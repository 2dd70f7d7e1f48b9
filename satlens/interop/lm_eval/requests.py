"""Requests of lm-eval as tokens: what is run, what is scored, what has to be cut or left out.

Contexts and continuations become tokens as lm-eval makes them for Hugging Face models: the context
alone, and of both together what follows as many tokens; spaces that end a context belong to its
continuation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lm_eval.api.instance import Instance
from lm_eval.api.model import hash_args
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows

from satlens.data.tokenizers import backend, encode, end_id
from satlens.errors import ConfigError, DataError
from satlens.interop.lm_eval.options import one_of

Truncation = Literal["error", "skip", "truncate"]
TRUNCATIONS: tuple[str, ...] = get_args(Truncation)
# Without sampling they say nothing.
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p")


@dataclass(frozen=True)
class Row:
    """Tokens of one pass, the last of which are scored."""

    inputs: tuple[int, ...]
    """Ids that the model reads."""
    targets: tuple[int, ...]
    """Ids that follow the last ``len(targets)`` of them."""


@dataclass(frozen=True)
class Note:
    """What became of a request."""

    tokens: int
    """Tokens of it that are used: context and continuation, or prompt."""
    truncated: bool = False
    """Whether its oldest tokens were cut off."""
    skipped: bool = False
    """Whether it was left out, and has no answer."""


@dataclass(frozen=True)
class Scoring:
    """A request for the log-probability of tokens: its rows add up to it; none if skipped."""

    key: str
    where: str
    rows: tuple[Row, ...]
    note: Note


@dataclass(frozen=True)
class Prompt:
    """A request to continue a text; no tokens if skipped."""

    key: str
    where: str
    tokens: tuple[int, ...]
    until: tuple[str, ...]
    n_new: int
    note: Note


def key_of(instance: Instance) -> str:
    """lm-eval's hash of a request: its kind and its arguments."""
    return hash_args(instance.request_type, instance.args)


class Requests:
    """Turns requests into rows and prompts.

    Args:
        tokenizer: a fast one.
        max_length: tokens of a pass.
        truncation: what to do with a longer request: raise, leave it out, or drop its oldest
            tokens.
        add_bos_token: whether contexts begin with the prefix token; None does as the tokenizer's
            own template does.
        prefix_token_id: the token before a text that has no context; None takes the one that the
            tokenizer's template begins with, else the end-of-document token.

    Raises:
        ConfigError: another ``truncation``.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        truncation: Truncation = "error",
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.truncation: Truncation = one_of("truncation", truncation, TRUNCATIONS)
        template = _template(tokenizer)
        self._prefix = prefix_token_id
        if prefix_token_id is None and template:
            self._prefix = template[0]
        self.bos = template
        if add_bos_token is not None:
            self.bos = (self.prefix,) if add_bos_token else ()

    @property
    def prefix(self) -> int:
        """The token before a text that has no context.

        Raises:
            DataError: none was given and the tokenizer has no end-of-document token.
        """
        return end_id(self.tokenizer) if self._prefix is None else self._prefix

    @property
    def identity(self) -> dict[str, Any]:
        """What decides, with the tokenizer, how a request is run; ready for JSON."""
        return {
            "truncation": self.truncation,
            "max_length": self.max_length,
            "bos": list(self.bos),
            "prefix": self._prefix,
        }

    def encode(self, texts: Iterable[str]) -> list[tuple[int, ...]]:
        """Ids of texts, without anything before or after."""
        return [tuple(ids.tolist()) for ids in encode(self.tokenizer, list(texts))]

    # -- log-probabilities --------------------------------------------------------------------

    def pairs(self, instances: Sequence[Instance]) -> list[Scoring]:
        """Requests (context, continuation).

        Raises:
            DataError: a continuation without tokens, or one that is too long where that is an
                error, naming task and question.
        """
        divided = [_spaces_moved(*instance.args) for instance in instances]
        # Choices share their context: every text is encoded once.
        texts = dict.fromkeys(
            text for context, rest in divided for text in (context, context + rest)
        )
        ids = dict(zip(texts, self.encode(texts), strict=True))
        found = []
        for instance, (context, rest) in zip(instances, divided, strict=True):
            if context:
                # As upstream: where a token would span the border, the context is as it is alone.
                before = self.bos + ids[context]
                after = ids[context + rest][len(ids[context]) :]
            else:
                before, after = self.without_context(ids[rest])
            found.append(self.scoring(key_of(instance), where(instance), before, after))
        return found

    def without_context(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(context, continuation) of a text that is all continuation: the prefix token is before
        it, unless it begins with that."""
        if tokens[:1] == (self.prefix,):
            return tokens[:1], tokens[1:]
        return (self.prefix,), tokens

    def scoring(
        self, key: str, where: str, context: tuple[int, ...], continuation: tuple[int, ...]
    ) -> Scoring:
        """The request to score a continuation, cut or skipped as it has to be.

        Raises:
            DataError: see :meth:`pairs`.
        """
        if not context or not continuation:
            what = "continuation" if context else "context"
            raise DataError(f"{where}: its {what} has no tokens")
        whole = context + continuation
        excess = len(whole) - 1 - self.max_length
        if excess <= 0:
            return Scoring(key, where, (Row(whole[:-1], continuation),), Note(len(whole)))
        if self.truncation == "skip":
            return Scoring(key, where, (), Note(0, skipped=True))
        if self.truncation == "error":
            raise self._too_long(where, len(whole) - 1)
        if len(continuation) > self.max_length:
            raise DataError(
                f"{where}: its continuation of {len(continuation)} tokens exceeds the context of "
                f"{self.max_length} by itself; truncation: skip leaves it out"
            )
        kept = whole[excess:]
        row = Row(kept[:-1], continuation)
        return Scoring(key, where, (row,), Note(len(kept), truncated=True))

    def texts(self, instances: Sequence[Instance]) -> list[Scoring]:
        """Requests (text,), in windows as long as the context; each token is scored once.

        Nothing is cut: a later window reads as many tokens before those it scores as fit.
        """
        texts = [instance.args[0] for instance in instances]
        found = []
        for instance, tokens in zip(instances, self.encode(texts), strict=True):
            windows = get_rolling_token_windows(
                token_list=list(tokens),
                prefix_token=self.prefix,
                max_seq_len=self.max_length,
                context_len=1,
            )
            rows = tuple(Row(tuple(inputs), tuple(targets)) for inputs, targets in windows)
            found.append(Scoring(key_of(instance), where(instance), rows, Note(len(tokens))))
        return found

    # -- continuations ------------------------------------------------------------------------

    def prompts(self, instances: Sequence[Instance], max_gen_toks: int) -> list[Prompt]:
        """Requests (context, generation settings).

        Args:
            max_gen_toks: new tokens where the settings do not say.

        Raises:
            ConfigError: settings other than greedy ones, or more new tokens than the context.
            DataError: prompt and new tokens are too long where that is an error.
        """
        contexts = dict.fromkeys(instance.args[0] for instance in instances)
        ids = dict(zip(contexts, self.encode(contexts), strict=True))
        found = []
        for instance in instances:
            arguments: Any = instance.args
            context, settings = arguments
            at = where(instance)
            until, n_new = _greedy_settings(at, settings, max_gen_toks)
            room = self.max_length - n_new
            if room < 1:
                raise ConfigError(
                    f"{at}: max_gen_toks: {n_new} new tokens leave no room in the context of "
                    f"{self.max_length}"
                )
            tokens = self.bos + ids[context] or (self.prefix,)
            note = Note(len(tokens))
            if len(tokens) > room:
                if self.truncation == "error":
                    raise self._too_long(at, len(tokens), n_new)
                keeps = self.truncation == "truncate"
                tokens = tokens[-room:] if keeps else ()
                note = Note(len(tokens), truncated=keeps, skipped=not keeps)
            found.append(Prompt(key_of(instance), at, tokens, until, n_new, note))
        return found

    def _too_long(self, where: str, n_tokens: int, n_new: int = 0) -> DataError:
        new = f" and {n_new} new ones" if n_new else ""
        return DataError(
            f"{where}: {n_tokens} tokens{new} exceed the context of {self.max_length}; "
            "truncation: skip or truncate, which are counted"
        )


def where(instance: Instance) -> str:
    """Task and question of a request, for errors."""
    if instance.task_name is None:
        return "request"
    return f"{instance.task_name}: question {instance.doc_id}"


def _spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    """Context without the spaces that end it, continuation with them."""
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _template(tokenizer: Any) -> tuple[int, ...]:
    """Ids that the tokenizer's own template puts before a text."""
    inner = backend(tokenizer)
    plain = inner.encode("a", add_special_tokens=False).ids
    framed = inner.encode("a", add_special_tokens=True).ids
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return tuple(framed[:start])
    return ()


def _greedy_settings(
    where: str, settings: dict[str, Any], max_gen_toks: int
) -> tuple[tuple[str, ...], int]:
    """Texts that end an answer, and its most tokens."""
    # The type that upstream declares has no further keys, the dict does.
    normal: dict[str, Any] = dict(normalize_gen_kwargs(settings, max_gen_toks))
    until, n_new = normal.pop("until"), normal.pop("max_gen_toks")
    if normal.get("do_sample"):
        raise ConfigError(
            f"{where}: do_sample: answers are the likeliest tokens here; satlens generate draws"
        )
    unknown = [name for name in normal if name not in _SAMPLING]
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]}: not a setting of greedy generation")
    if n_new < 1:
        raise ConfigError(f"{where}: max_gen_toks: must be positive, got {n_new}")
    return tuple(stop for stop in until if stop), n_new

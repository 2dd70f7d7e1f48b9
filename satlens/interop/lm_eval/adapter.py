"""The model that lm-eval talks to: requests in, log-probabilities and texts out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

import satlens
from satlens.errors import AnalysisError, ConfigError, DataError, SatlensError

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import hash_args
    from lm_eval.api.registry import model_registry
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lm_eval":
        raise
    raise SatlensError("lm_eval: not installed; pip install 'satlens[eval]'") from None

from tqdm import tqdm

from satlens.checkpoints import load
from satlens.data.tokenizers import end_id, fingerprint
from satlens.interop.lm_eval.answers import Answers, open_answers
from satlens.interop.lm_eval.options import (
    named_dtype,
    one_of,
    parsed_interventions,
    positive,
    within_context,
)
from satlens.interop.lm_eval.passes import (
    PADDING_SIDES,
    PaddingSide,
    Show,
    answer_prompts,
    answer_scorings,
)
from satlens.interop.lm_eval.processes import SharedLM, leave
from satlens.interop.lm_eval.requests import Note, Prompt, Requests, Scoring, Truncation
from satlens.models.attention import chosen_attention
from satlens.models.decoder import Decoder
from satlens.models.identity import weights_sha256
from satlens.provenance import source_sha256

NAME = "satlens"
MAX_NEW_TOKENS = 256
"""Of a generation request that does not say; as for Hugging Face models."""

_CODE = ("config.py", "data/tokenizers.py", "models", "interop", "analysis/interventions")
"""Sources that decide an answer."""

_logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
Planned = TypeVar("Planned", Scoring, Prompt)


class SatlensLM(SharedLM):
    """A checkpoint, or a model, as lm-eval asks for it.

    Log-probabilities are sums in float64 of an fp32 softmax, in nats. They depend on batch size
    and padding by rounding alone. A text without context follows the tokenizer's end-of-document
    token. A special token spelt out in a text is text, as everywhere in satlens; Hugging Face
    models read it as the token.

    Args:
        path: a checkpoint folder, or ``org/name`` on the hub.
        model: a model in place of a path.
        device: where a checkpoint is opened; a model stays where it is.
        dtype: of a checkpoint's weights; None keeps the file's.
        batch_size: rows of a pass.
        padding_side: where shorter rows of a pass are padded; prompts to continue always are on
            the left.
        truncation: of requests beyond the context: ``error`` raises before anything is scored,
            ``skip`` answers nan (or no text), ``truncate`` drops the oldest tokens. The latter two
            are counted in ``counts`` and marked in ``notes``; lm-eval by itself scores a skipped
            question like any other, :func:`satlens.evaluate_tasks` leaves it out.
        max_length: tokens of a pass, at most the model's n_ctx, the default.
        intervene: interventions that all passes run under: as text (several in one text are
            separated by ``;``), as objects, or several of either.
        add_bos_token: whether contexts begin with the prefix token; None does as the tokenizer's
            own template does.
        prefix_token_id: the token before a text that has no context.
        responses: a folder where answers are kept as they are found; the same evaluation continues
            from them.
        value_residual: as for :func:`satlens.load`.
        progress: called with what is being done, requests done and requests in all; None shows a
            bar.

    Attributes:
        notes: what became of each request, by lm-eval's hash of it (``hash_args``). Under several
            processes those of the others are there after ``barrier``.

    Raises:
        ConfigError: an impossible option.
        CheckpointError: the checkpoint cannot be opened.
        DataError: a model without tokenizer.
        HookError, AnalysisError: an intervention that this model cannot have.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        model: Decoder | None = None,
        device: str = "cpu",
        dtype: str | torch.dtype | None = None,
        batch_size: int | str = 8,
        padding_side: PaddingSide = "right",
        truncation: Truncation = "error",
        max_length: int | None = None,
        intervene: Any = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        responses: str | Path | None = None,
        value_residual: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        if (path is None) == (model is None):
            raise ConfigError("path, model: give one of them")
        if model is None:
            model = load(
                str(path),
                device=self.own_device(device),
                dtype=named_dtype(dtype),
                value_residual=value_residual,
            )
        if model.tokenizer is None:
            raise DataError(f"{path or 'model'}: no tokenizer.json, which texts to score need")
        self.model = model
        self._device = model.device
        self.batch_size = positive("batch_size", batch_size)
        self.padding_side: PaddingSide = one_of("padding_side", padding_side, PADDING_SIDES)
        self.max_length = within_context(max_length, model.cfg.n_ctx)
        self.requests = Requests(
            model.tokenizer, self.max_length, truncation, add_bos_token, prefix_token_id
        )
        self.interventions = parsed_interventions(intervene)
        with satlens.intervene(model, *self.interventions):
            pass  # says now what it would say at the first pass
        self.notes: dict[str, Note] = {}
        self._responses = responses
        self._identity: dict[str, Any] = {} if responses is None else self._protocol()
        self._progress = progress

    # -- what lm-eval asks --------------------------------------------------------------------

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether it is the likeliest) of each request.

        Raises:
            DataError: a request that is too long, by ``truncation="error"``.
            AnalysisError: a log-probability that is not finite.
        """
        return self._scores(self.requests.pairs(requests), "log-probabilities", disable_tqdm)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of each whole text, each token read with all the context that fits."""
        texts = self.requests.texts(requests)
        return [total for total, _ in self._scores(texts, "texts", disable_tqdm)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The likeliest continuation of each request, up to what ends it.

        Raises:
            ConfigError: settings that are not greedy.
            DataError: a prompt that is too long, by ``truncation="error"``.
        """
        return self._texts(self.requests.prompts(requests, self.max_gen_toks), disable_tqdm)

    def check(self, requests: Sequence[Instance]) -> None:
        """Raise what answering requests of any kinds would raise for their length.

        Raises:
            DataError, ConfigError: see the methods that answer.
        """
        for kind, prepare in (
            ("loglikelihood", self.requests.pairs),
            ("generate_until", lambda some: self.requests.prompts(some, self.max_gen_toks)),
        ):
            prepare([request for request in requests if request.request_type == kind])

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """:meth:`loglikelihood` of (anything, context ids, continuation ids)."""
        scorings = [
            self.requests.scoring(
                hash_args("tokens", (list(context), list(rest))),
                f"request {number}",
                tuple(context),
                tuple(rest),
            )
            for number, (_, context, rest) in enumerate(requests)
        ]
        return self._scores(scorings, "log-probabilities", disable_tqdm)

    # -- what became of the requests ----------------------------------------------------------

    @property
    def counts(self) -> dict[str, int]:
        """``requests`` (different ones), ``tokens`` of them that were used, ``truncated`` and
        ``skipped`` requests."""
        return {
            "requests": len(self.notes),
            "tokens": sum(note.tokens for note in self.notes.values()),
            "truncated": len(self.truncated),
            "skipped": len(self.skipped),
        }

    @property
    def truncated(self) -> set[str]:
        """Requests whose oldest tokens were cut off, by lm-eval's hash."""
        return {key for key, note in self.notes.items() if note.truncated}

    @property
    def skipped(self) -> set[str]:
        """Requests that were left out, by lm-eval's hash."""
        return {key for key, note in self.notes.items() if note.skipped}

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes down with its results."""
        return {
            "model_num_parameters": self.model.n_parameters(),
            "model_dtype": str(self.model.dtype),
            "model_sha": self.model.provenance.get("sha256"),
            "satlens": satlens.__version__,
            "checkpoint": self.model.provenance.get("checkpoint"),
            "tokenizer_sha256": self.tokenizer_name,
            "interventions": [one.identity for one in self.interventions],
            **self.requests.identity,
            "padding_side": self.padding_side,
            "request_counts": self.counts,
        }

    # -- answering ----------------------------------------------------------------------------

    def _scores(
        self, scorings: Sequence[Scoring], label: str, quiet: bool
    ) -> list[tuple[float, bool]]:
        wanted = self._noted(scorings)
        with self._answering() as answers, self._shown(label, len(wanted), quiet) as show:
            answer_scorings(self.model, wanted, answers, self.batch_size, self.padding_side, show)
            return [
                (float("nan"), False) if each.note.skipped else tuple(answers[each.key])
                for each in scorings
            ]

    def _texts(self, prompts: Sequence[Prompt], quiet: bool) -> list[str]:
        wanted = self._noted(prompts)
        with self._answering() as answers, self._shown("answers", len(wanted), quiet) as show:
            answer_prompts(self.model, wanted, answers, self.batch_size, self._ends(), show)
            return ["" if each.note.skipped else answers[each.key] for each in prompts]

    def _noted(self, requests: Sequence[Planned]) -> dict[str, Planned]:
        """Different requests that are not skipped, by key; what is cut or skipped is said."""
        new = {each.key: each.note for each in requests}
        self.notes |= new
        for verb in ("truncated", "skipped"):
            if n := sum(getattr(note, verb) for note in new.values()):
                share = f"{n} of {len(new)} requests {verb}"
                _logger.warning("%s: longer than %d tokens", share, self.max_length)
        return {each.key: each for each in requests if not each.note.skipped}

    @contextmanager
    def _answering(self) -> Iterator[Answers]:
        """The model under its interventions, and the answers that are there."""
        if self._responses is not None:
            _refuse_foreign_hooks(self.model)
        with (
            open_answers(self._responses, self._identity, self.rank) as answers,
            satlens.intervene(self.model, *self.interventions),
        ):
            yield answers

    @contextmanager
    def _shown(self, label: str, total: int, quiet: bool) -> Iterator[Show]:
        """Progress, given the requests that have an answer."""
        if self._progress is not None:
            progress = self._progress
            yield lambda done: progress(label, done, total)
            return
        with tqdm(total=total, desc=label, disable=quiet or self.rank != 0) as bar:
            yield lambda done: bar.update(done - bar.n)

    def _protocol(self) -> dict[str, Any]:
        """Everything that decides an answer beside its request."""
        return {
            "weights": weights_sha256(self.model),
            "tokenizer": self.tokenizer_name,
            "interventions": [one.identity for one in self.interventions],
            "requests": self.requests.identity,
            "attention": chosen_attention(),
            "device": self.model.device.type,
            "torch": torch.__version__,
            "satlens": [satlens.__version__, source_sha256(*_CODE)],
        }

    # -- what it is ---------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return end_id(self.model.tokenizer)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        return self.requests.prefix

    @property
    def max_gen_toks(self) -> int:
        """New tokens of a generation request that does not say."""
        return MAX_NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        """Fingerprint of the tokenizer."""
        return fingerprint(self.model.tokenizer)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text; as a context unless ``add_special_tokens`` is False."""
        bos = () if add_special_tokens is False else self.requests.bos
        return [*bos, *self.requests.encode([string])[0]]

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
        """Refused.

        Raises:
            ConfigError: always; checkpoints here have no chat template.
        """
        raise ConfigError("apply_chat_template: satlens checkpoints have no chat template")

    def _ends(self) -> list[int]:
        """Tokens that end an answer."""
        try:
            return [self.eot_token_id]
        except DataError:  # it has none
            return []

    def barrier(self) -> None:
        """Wait for all processes; each then has the notes of all."""
        for notes in self.gathered(self.notes):
            self.notes |= notes


def _refuse_foreign_hooks(model: Decoder) -> None:
    """Answers are kept by what is known of the model, and hooks of a caller's own are not."""
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        raise AnalysisError(
            "responses: the model carries hooks, whose effect kept answers cannot know; give "
            "interventions by intervene, or leave responses out"
        )


if NAME not in model_registry:
    model_registry.register(NAME, target=f"{__name__}:{SatlensLM.__name__}")


def main() -> None:
    """lm-eval's own command, which knows satlens models."""
    from lm_eval.__main__ import cli_evaluate

    import satlens.interop.huggingface  # noqa: F401  # folders of satlens models for --model hf

    try:
        cli_evaluate()
    except SatlensError as error:
        print(f"satlens: error: {error}", file=sys.stderr)
        sys.exit(1)
    leave()

"""Text from a model, token by token.

Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from satlens.data.tokenizers import encode, end_id
from satlens.errors import ConfigError, DataError
from satlens.models.cache import KVCache

Prompt = str | Sequence[str] | Tensor
Progress = Callable[[str, int, int], None]


class Generation:
    """``generate`` of a decoder."""

    if TYPE_CHECKING:
        cfg: Any
        tokenizer: Any
        device: torch.device
        __call__: Callable[..., Any]
        _check: Callable[[Any], Tensor]
        _tokenizer: Callable[[], Any]
        to_string: Callable[[Tensor], str]

    @torch.no_grad()
    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 20,
        *,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | Literal["auto"] | None = "auto",
        attention_mask: Tensor | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        return_type: Literal["auto", "tokens", "text"] = "auto",
        progress: Progress | None = None,
    ) -> Tensor | str | list[str]:
        """Continue prompts with the likeliest token each time, or with drawn ones.

        Hooks and interventions act as in one pass over the final sequence: they see every position
        once, in several passes, except the last new token, which nothing has read.

        Args:
            prompt: a text, texts of any lengths, or (B, T) ids padded on the left.
            max_new_tokens: to add to each row. Fewer are added if every row ends before.
            do_sample: draw from the distribution that ``temperature``, then ``top_k``, then
                ``top_p`` leave of the model's; otherwise take the likeliest.
            temperature: what logits are divided by.
            top_k: keep this many likeliest tokens, and those that tie with the last of them.
            top_p: keep the likeliest tokens whose probabilities reach this sum.
            eos_token_id: token or tokens that end a row; "auto" is the tokenizer's end of text, if
                it has one; None ends no row.
            attention_mask: (B, T), 0 marks the padding of ids.
            seed: of the draws; or a ``generator`` on the model's device. Without either torch's
                own is used.
            return_type: "auto" gives text for text and ids for ids.
            progress: called with what is being done, tokens done and tokens in all.

        Returns:
            Prompt and continuation. Ids: (B, T + new), rows that ended filled up with the (first)
            token that ends rows. Text: without padding and end; a str for a str, else a list.

        Raises:
            DataError: no prompt, text without a tokenizer, padding anywhere but on the left, or
                prompt and continuation longer than n_ctx together.
            ConfigError: an option that is impossible or has no effect.
        """
        _check_options(max_new_tokens, do_sample, temperature, top_k, top_p, seed, generator)
        if return_type not in ("auto", "tokens", "text"):
            raise ConfigError(f"return_type: must be auto, tokens or text, got {return_type!r}")
        ends = self._ends(eos_token_id)
        tokens, mask = self._prompts(prompt, attention_mask, ends)
        n_prompt = tokens.shape[1]
        if n_prompt + max_new_tokens > self.cfg.n_ctx:
            raise DataError(
                f"max_new_tokens: {n_prompt} prompt tokens and {max_new_tokens} new ones exceed "
                f"n_ctx={self.cfg.n_ctx}"
            )
        if seed is not None:
            generator = torch.Generator(self.device).manual_seed(seed)

        def choose(logits: Tensor) -> Tensor:
            if not do_sample:
                return logits.argmax(-1)
            kept = restrict(logits / temperature, top_k, top_p)
            return torch.multinomial(kept.softmax(-1), 1, generator=generator)[:, 0]

        tokens = self._continue(tokens, mask, max_new_tokens, ends, choose, progress)
        is_text = not isinstance(prompt, Tensor)
        if return_type == "tokens" or (return_type == "auto" and not is_text):
            return tokens
        texts = self._texts(tokens, mask, n_prompt, ends)
        return texts[0] if isinstance(prompt, str) else texts

    def _continue(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Bool[Tensor, "B T"] | None,
        n_new: int,
        ends: list[int],
        choose: Callable[[Tensor], Tensor],
        progress: Progress | None,
    ) -> Int[Tensor, "B longer"]:
        """The loop: run the newest token, choose the next, until all rows ended."""
        n_prompt = tokens.shape[1]
        cache = KVCache(reserve=n_prompt + n_new)
        if n_prompt > 1:  # Only the last prompt token needs logits.
            before = None if mask is None else mask[:, :-1]
            self(tokens[:, :-1], None, attention_mask=before, past=cache)
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        end = torch.tensor(ends, dtype=tokens.dtype, device=tokens.device)
        report = progress or (lambda label, done, total: None)
        report("generate", 0, n_new)
        for done in range(n_new):
            logits = self(tokens[:, -1:], past=cache)[:, -1]
            chosen = choose(logits).to(tokens.dtype)
            if ends:
                chosen = torch.where(ended, end[0], chosen)
                ended |= torch.isin(chosen, end)
            tokens = torch.cat((tokens, chosen[:, None]), 1)
            report("generate", done + 1, n_new)
            if ends and bool(ended.all()):
                break
        return tokens

    def _ends(self, given: Any) -> list[int]:
        """The ids that end a row."""
        if given is None:
            return []
        if isinstance(given, str):
            if given != "auto":
                raise ConfigError(f"eos_token_id: must be ids, 'auto' or None, got {given!r}")
            if self.tokenizer is None:
                return []
            try:
                return [end_id(self.tokenizer)]
            except DataError:  # it has none
                return []
        ends = [given] if isinstance(given, int) else [int(i) for i in given]
        for i in ends:
            if not 0 <= i < self.cfg.d_vocab:
                raise ConfigError(f"eos_token_id: {i} is outside d_vocab={self.cfg.d_vocab}")
        return ends

    def _prompts(
        self, prompt: Prompt, mask: Tensor | None, ends: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Ids (B, T) and which of them are no padding, (B, T) bool; None if all are."""
        if isinstance(prompt, Tensor):
            tokens = self._check(prompt)
            return tokens, None if mask is None else _left_padding(tokens, mask)
        if mask is not None:
            raise DataError("attention_mask: goes with ids; texts are padded as they need it")
        texts = [prompt] if isinstance(prompt, str) else prompt
        several = isinstance(texts, list | tuple) and len(texts) > 0
        if not several or not all(isinstance(text, str) for text in texts):
            raise DataError("prompt: expected a text, texts or a tensor of ids")
        rows = [torch.from_numpy(row) for row in encode(self._tokenizer(), texts)]
        if not all(len(row) for row in rows):
            raise DataError("prompt: a text of no tokens has nothing to continue")
        longest = max(len(row) for row in rows)
        tokens = torch.full((len(rows), longest), ends[0] if ends else 0)
        real = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, row in enumerate(rows):
            tokens[i, longest - len(row) :] = row
            real[i, longest - len(row) :] = True
        tokens, real = tokens.to(self.device), real.to(self.device)
        return tokens, None if real.all() else real

    def _texts(
        self, tokens: Tensor, mask: Tensor | None, n_prompt: int, ends: list[int]
    ) -> list[str]:
        """Each row as text, from its first token that is no padding to its end."""
        texts = []
        for i, row in enumerate(tokens.tolist()):
            start = 0 if mask is None else n_prompt - int(mask[i].sum())
            stop = next((t for t in range(n_prompt, len(row)) if row[t] in ends), len(row))
            texts.append(self.to_string(torch.tensor(row[start:stop])))
        return texts


def restrict(
    logits: Float[Tensor, "B V"], top_k: int | None, top_p: float | None
) -> Float[Tensor, "B V"]:
    """Logits with -inf where top-k, then top-p, leave a token out."""
    if top_k is not None:
        smallest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if top_p is not None:
        ordered, index = logits.sort()
        # Out are the unlikeliest that together have what top_p leaves; the likeliest stays.
        out = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        out[..., -1] = False
        logits = logits.masked_fill(out.scatter(-1, index, out), float("-inf"))
    return logits


def _left_padding(tokens: Tensor, mask: Tensor) -> Tensor | None:
    """The mask as bool, checked; None if nothing is masked."""
    real = mask != 0
    if real.shape != tokens.shape:
        raise DataError(
            f"attention_mask: expected the shape of the prompt {[*tokens.shape]}, "
            f"got {[*real.shape]}"
        )
    if bool(real.all()):
        return None
    if not bool(real[:, -1].all()) or bool((real[:, 1:] < real[:, :-1]).any()):
        raise DataError("attention_mask: prompts are continued at their end; pad on the left")
    return real


def _check_options(
    max_new_tokens: int,
    do_sample: bool,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    generator: torch.Generator | None,
) -> None:
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens: must be positive, got {max_new_tokens}")
    if not do_sample and (temperature != 1 or top_k is not None or top_p is not None):
        raise ConfigError("temperature, top_k, top_p: they need do_sample=True (--sample)")
    if not temperature > 0:
        raise ConfigError(
            f"temperature: must be positive, got {temperature}; the likeliest token is "
            "do_sample=False"
        )
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k: must be positive, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p: must lie in (0, 1], got {top_p}")
    if seed is not None and generator is not None:
        raise ConfigError("seed, generator: give one of them")

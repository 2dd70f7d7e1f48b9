"""satlens models as Hugging Face ones: importing this module registers them with the Auto classes.

    import satlens.interop.huggingface
    model = AutoModelForCausalLM.from_pretrained("folder")    # what satlens.save wrote
    model.save_pretrained("other")                            # what satlens.load reads

The model is the :class:`~satlens.models.decoder.Decoder` itself, as ``model.model``: nothing is
computed twice, and every hook point, analysis and intervention works on it. The configuration file
says all there is to know, so no code is ever fetched with a checkpoint.

Shapes: B batch, T position, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.hub import cached_file

from satlens.checkpoints.files import CONFIG, TOKENIZER, json_bytes, read_json, weight_files
from satlens.checkpoints.layouts.huggingface import HuggingFace
from satlens.checkpoints.layouts.native import Native
from satlens.checkpoints.manifest import verify
from satlens.config import ModelConfig
from satlens.data.tokenizers import backend, end_id, load_tokenizer
from satlens.errors import CheckpointError, ConfigError, DataError
from satlens.interop.huggingface_cache import SatlensKVCache
from satlens.interop.huggingface_config import SatlensConfig
from satlens.models.attention import attention, chosen_attention
from satlens.models.cache import KVCache
from satlens.models.decoder import Decoder
from satlens.models.loss import IGNORED
from satlens.models.streams import STREAMS


class SatlensForCausalLM(PreTrainedModel, GenerationMixin):
    """A satlens decoder behind transformers' interface; the decoder itself is ``model``.

    Args:
        config: what it is.
        seed: seed of fresh weights, drawn as :func:`satlens.build` draws them.
        decoder: a model to take over as it is, in place of a fresh one.
    """

    config_class = SatlensConfig
    config: SatlensConfig
    base_model_prefix = "model"
    _input_embed_layer = "embed"
    # A tied model has no second table: its unembedding reads the embedding's.
    _tied_weights_keys: ClassVar[dict[str, str]] = {}
    _no_split_modules: ClassVar[list[str]] = sorted({s.block.__name__ for s in STREAMS.values()})
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True

    def __init__(
        self, config: SatlensConfig, seed: int = 0, decoder: Decoder | None = None
    ) -> None:
        super().__init__(config)
        self.model = _fresh(config.to_satlens(), seed) if decoder is None else decoder
        self.train(self.model.training)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the decoder draws its own start, and what was loaded stays as it is."""

    # -- loading and saving -------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Open a folder (or hub id) that ``save_pretrained`` or :func:`satlens.save` wrote.

        Every weight equals the file's, cast to ``dtype`` if one is given. A local folder with our
        manifest is checked against it.

        Raises:
            CheckpointError: a tensor that is missing or that this model does not have, a file that
                the manifest contradicts.
        """
        path, wants_info = pretrained_model_name_or_path, kwargs.pop("output_loading_info", False)
        if path is not None:
            _check_manifest(Path(path))
        loaded: Any = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        for what, verb in (("missing_keys", "lacks"), ("unexpected_keys", "has unknown")):
            if info[what]:
                names = ", ".join(sorted(info[what])[:4])
                raise CheckpointError(f"{path}: it {verb} tensors: {names}")
        if path is not None:
            _give_tokenizer(model, _tokenizer(path, kwargs))
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write a folder for ``from_pretrained`` and :func:`satlens.load`, with the tokenizer."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if self.model.tokenizer is not None and kwargs.get("is_main_process", True):
            text = backend(self.model.tokenizer).to_str(pretty=True)
            (Path(save_directory) / TOKENIZER).write_text(text, encoding="utf-8")
            config = _tokenizer_config(self.model.tokenizer)
            (Path(save_directory) / TOKENIZER_CONFIG).write_bytes(json_bytes(config, TOKENIZER))

    # -- embeddings ---------------------------------------------------------------------------

    def get_output_embeddings(self) -> nn.Module | None:
        """The unembedding; None where the embedding table serves as such."""
        return None if self.config.tie_word_embeddings else self.model.unembed

    def set_input_embeddings(self, value: nn.Module) -> NoReturn:
        raise ConfigError(_FIXED_VOCABULARY)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> NoReturn:
        raise ConfigError(_FIXED_VOCABULARY)

    def resize_token_embeddings(  # type: ignore[override]
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """The embedding; another size is refused."""
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ConfigError(_FIXED_VOCABULARY)
        return self.model.embed

    # -- gradient checkpointing ---------------------------------------------------------------

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Any = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Switch the decoder's own, which runs every block again in the backward pass."""
        options = getattr(gradient_checkpointing_func, "keywords", {})
        wrapped = getattr(gradient_checkpointing_func, "func", gradient_checkpointing_func)
        if every_n_layers != 1 or wrapped is not checkpoint or options.get("use_reentrant"):
            raise ConfigError(
                "gradient_checkpointing: a satlens model reruns every layer, without offloading, "
                "with use_reentrant=False; leave the options out"
            )
        self.model.gradient_checkpointing = enable

    def enable_input_require_grads(self) -> None:
        """Nothing: only reentrant checkpoints need it, and a hook would switch ours off."""

    # -- forward ------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: Cache | None = None,
    ) -> Any:
        """Run the model.

        Args:
            input_ids: (B, T) ids.
            attention_mask: 0 marks padding on either side; (B, T), or of the positions in the
                cache too.
            cache: a :class:`SatlensKVCache` of earlier positions, which the ids continue and join.
            use_cache: begin one if none is given. A pass with a cache carries no gradients.
            past_key_values: former name of ``cache``.
            labels: (B, T), -100 to skip; position t scores label t + 1. As for transformers' own
                models, the mask does not say what to score: after left padding, give the first
                real token the label -100, or padding is asked to predict it.
            logits_to_keep: how many of the last positions to return logits of (0: all), or which.
            num_items_in_batch: divide the summed loss by this in place of the scored positions.
            return_dict: False returns a plain tuple.

        Returns:
            ``loss`` (nats, with labels), ``logits`` in fp32, and ``cache`` if one is used.

        Raises:
            ConfigError: hidden states or attentions are asked for.
            DataError: no ids, ids that the model cannot run, a cache of another kind.
        """
        if output_attentions or output_hidden_states:
            raise ConfigError(
                "output_attentions, output_hidden_states: not offered here; use "
                "model.model.run_with_cache, which has every hook point by name"
            )
        if input_ids is None:
            raise DataError("input_ids: missing; embeddings in their place are not offered")
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = SatlensKVCache()
        if not isinstance(cache, SatlensKVCache | None):
            raise DataError(f"cache: expected a SatlensKVCache, got {type(cache).__name__}")
        if attention_mask is not None:
            attention_mask = attention_mask[:, -input_ids.shape[1] :]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        with _implementation(self.config):
            if cache is None:
                logits = self.model(input_ids, attention_mask=attention_mask)
            elif labels is None and isinstance(logits_to_keep, int):
                logits = self._last_logits(input_ids, attention_mask, cache.kv, logits_to_keep)
            else:
                logits = self.model(input_ids, attention_mask=attention_mask, past=cache.kv)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits,
                labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=IGNORED,
            )
        output = CausalLMOutputWithPast(loss=loss, logits=logits[:, kept], cache=cache)
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _last_logits(
        self, tokens: Tensor, mask: Tensor | None, past: KVCache, n_last: int
    ) -> Tensor:
        """Logits of the last positions; for those before, none are computed."""
        split = tokens.shape[1] - n_last
        if not 0 < split < tokens.shape[1]:
            return self.model(tokens, attention_mask=mask, past=past)
        before, last = (None, None) if mask is None else (mask[:, :split], mask[:, split:])
        self.model(tokens[:, :split], None, attention_mask=before, past=past)
        return self.model(tokens[:, split:], attention_mask=last, past=past)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """``generate`` begins with a cache of our kind; it refuses to be told another kind."""
        if generation_config.use_cache is not False and model_kwargs.get("cache") is None:
            model_kwargs["cache"] = SatlensKVCache()
        default: Any = super()
        default._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)


TOKENIZER_CONFIG = "tokenizer_config.json"
_FIXED_VOCABULARY = "vocab_size: a satlens model keeps its vocabulary; build one of the other size"


def _fresh(cfg: ModelConfig, seed: int) -> Decoder:
    """A decoder of torch's default dtype, which is how transformers says what it wants.

    Drawn in fp32 and cast, as :func:`satlens.build` does.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return Decoder(cfg, seed).to(dtype)
    finally:
        torch.set_default_dtype(dtype)


def _implementation(config: SatlensConfig) -> AbstractContextManager[None]:
    """``attn_implementation="eager"`` is ours; otherwise the enclosing choice stands."""
    if config._attn_implementation == "eager" and chosen_attention() == "auto":
        return attention("eager")
    return nullcontext()


def _check_manifest(folder: Path) -> None:
    """Check a folder that :func:`satlens.save` wrote; others have no manifest."""
    if not (folder / CONFIG).is_file():
        return
    config = read_json(folder / CONFIG)
    if Native().matches(config) and not HuggingFace().matches(config):
        verify(folder, weight_files(folder))


# Options of from_pretrained that say where a file is looked for.
_WHERE = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def _tokenizer(path: Any, options: dict[str, Any]) -> Any:
    """The checkpoint's tokenizer, or None."""
    where = {key: options[key] for key in _WHERE if key in options}
    file = cached_file(path, TOKENIZER, _raise_exceptions_for_missing_entries=False, **where)
    return None if file is None else load_tokenizer(file)


def _tokenizer_config(tokenizer: Any) -> dict[str, Any]:
    """What :func:`to_hf_tokenizer` sets, for AutoTokenizer, which would invent its own tokens."""
    config = {"tokenizer_class": PreTrainedTokenizerFast.__name__, "padding_side": "left"}
    try:
        end = backend(tokenizer).id_to_token(end_id(tokenizer))
    except DataError:  # it has none
        return config
    return {**config, "eos_token": end, "pad_token": end}


def _give_tokenizer(model: SatlensForCausalLM, tokenizer: Any) -> None:
    """Its end-of-text token ends rows in ``generate``, as in the decoder's own."""
    model.model.tokenizer = tokenizer
    settings = model.generation_config
    if tokenizer is None or settings is None or settings.eos_token_id is not None:
        return
    try:
        settings.eos_token_id = settings.pad_token_id = end_id(tokenizer)
    except DataError:  # it has none
        return


# -- to and fro ----------------------------------------------------------------------------------


def to_hf(model: Decoder) -> SatlensForCausalLM:
    """A satlens model behind transformers' interface; the weights are shared, not copied."""
    wrapped = SatlensForCausalLM(SatlensConfig.of(model.cfg), decoder=model)
    _give_tokenizer(wrapped, model.tokenizer)
    return wrapped


def from_hf(model: SatlensForCausalLM) -> Decoder:
    """The satlens model inside, for analyses, hooks and interventions.

    Raises:
        ConfigError: another kind of model; :func:`satlens.load` opens Llama checkpoints.
    """
    if not isinstance(model, SatlensForCausalLM):
        raise ConfigError(
            f"model: {type(model).__name__} is no satlens model; satlens.load opens the "
            "checkpoint folders of published layouts"
        )
    return model.model


def to_hf_tokenizer(model: Decoder) -> PreTrainedTokenizerFast:
    """The model's tokenizer behind transformers' interface; it pads left, with the end token.

    Raises:
        DataError: the model has none, or it has no end-of-document token.
    """
    if model.tokenizer is None:
        raise DataError("tokenizer: this model has none; pass token ids")
    inner = backend(model.tokenizer)
    end = inner.id_to_token(end_id(inner))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, pad_token=end, padding_side="left"
    )


AutoConfig.register(SatlensConfig.model_type, SatlensConfig, exist_ok=True)
AutoModelForCausalLM.register(SatlensConfig, SatlensForCausalLM, exist_ok=True)
AutoTokenizer.register(SatlensConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)

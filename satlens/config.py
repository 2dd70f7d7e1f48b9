"""Typed configurations: what a model is and how it is trained. Imports no torch.

Every class is a frozen, keyword-only dataclass checked on construction; an unknown key, a wrong
type or an impossible value raises :class:`satlens.errors.ConfigError` with one line.
"""

from __future__ import annotations

import difflib
import math
import re
from copy import copy
from dataclasses import asdict, fields, replace
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator
from pydantic.dataclasses import dataclass

from satlens.errors import ConfigError

STRICT = ConfigDict(extra="forbid")


def _whole(value: Any) -> Any:
    """``2e5``, which YAML takes for text, is a whole number too."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?[eE]\+?\d{1,2}", value.strip()):
        number = Decimal(value.strip())
        return int(number) if number == number.to_integral_value() else value
    return value


Count = Annotated[int, BeforeValidator(_whole)]

GateFunction = Literal["relu", "sigmoid", "softmax", "softmax_sigmoid", "tanh", "identity"]
StaticMode = Literal["identity", "constant", "sparse", "learnable", "learnable_plus"]
RouteControl = Literal["none", "tied", "average", "frozen_v"]


# -- value residuals: what is added to a layer's values ------------------------------------------


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NoValueResidual:
    """Plain values."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StaticValueResidual:
    """ResFormer (arXiv 2410.17897): V'_n = lambda1_n V_1 + lambda2_n V_n, layers 1 to L-1."""

    kind: Literal["static"] = "static"
    mode: StaticMode = "learnable_plus"
    """How lambda1 and lambda2 are set: fixed (identity, constant, sparse) or trained."""
    weights: tuple[float, float] = (0.5, 0.5)
    """(lambda1, lambda2) of the modes constant and sparse, and the start of learnable."""
    layers: tuple[int, ...] = ()
    """Layers that mix under mode sparse; the others keep (0, 1)."""
    lambda2_init: float = 0.5
    """Start of lambda2 under learnable_plus."""
    last_k: int | None = None
    """Mix only in the last k layers; null mixes in every layer but the first."""

    def __post_init__(self) -> None:
        sparse = self.mode == "sparse"
        _require(bool(self.layers) or not sparse, "layers", "mode sparse needs some", self.layers)
        used_by = {
            "layers": ("sparse",),
            "weights": ("constant", "sparse", "learnable"),
            "lambda2_init": ("learnable_plus",),
            "last_k": ("identity", "constant", "learnable", "learnable_plus"),
        }
        for field in fields(self):
            modes, value = used_by.get(field.name), getattr(self, field.name)
            unused = modes is not None and self.mode not in modes and value != field.default
            _require(not unused, field.name, f"has no effect under mode {self.mode}", value)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GatedValueResidual:
    """SATFormer (arXiv 2605.03953): V'_tj = V_tj + g(x_t W_alpha)_j V_1,tj, layers 1 to L-1."""

    kind: Literal["gated"] = "gated"
    gate: GateFunction = "relu"
    """Gate function g; softmax variants run over KV heads and are scaled by their number."""
    bias: bool = False
    """Whether the gate projection has a bias (zero at the start)."""
    last_k: int | None = None
    """Gate only the last k layers; null gates every layer but the first."""


ValueResidual = NoValueResidual | StaticValueResidual | GatedValueResidual


# -- depth streams: how a sublayer reads what earlier ones wrote ----------------------------------


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ResidualStream:
    """The ordinary residual stream."""

    kind: Literal["residual"] = "residual"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AttnResStream:
    """Attention Residuals (arXiv 2603.15031): each read is a softmax over block sums."""

    kind: Literal["attnres"] = "attnres"
    block_size: int = 4
    """Sublayers (attention or MLP) summed into one source; 1 is Full AttnRes."""
    output_read: bool = True
    """Whether the final norm receives a read of its own (else the sum of all sources)."""
    route_bias: bool = False
    """Whether each source of each read has a trained logit bias (zero at the start)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RoleDecoupledStream:
    """RD-AttnRes (arXiv 2608.01075): queries and keys read by one route, values by another."""

    kind: Literal["rd_attnres"] = "rd_attnres"
    block_size: int = 4
    """Sublayers summed into one source."""
    control: RouteControl = "none"
    """none (decoupled), tied (values use the qk route), average (all use the mean of both
    routes) or frozen_v (values read uniformly)."""
    output_read: bool = True
    """Whether the final norm receives a read of its own (else the sum of all sources)."""
    route_bias: bool = False
    """Whether each source of each read has a trained logit bias (zero at the start)."""
    own_value_gamma: bool = False
    """Whether the values' route norms the sources with a gamma of its own, as the community's
    AttnRes code does, instead of sharing the one of queries and keys."""

    def __post_init__(self) -> None:
        idle = self.own_value_gamma and self.control in ("tied", "frozen_v")
        rule = f"has no effect under control {self.control}"
        _require(not idle, "own_value_gamma", rule, self.own_value_gamma)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DenseStream:
    """DenseFormer (arXiv 2402.02622): static weights over the states after earlier layers."""

    kind: Literal["dense"] = "dense"
    dilation: int = 1
    """k: after layer i, states j with j = i (mod k) are weighed."""
    period: int = 1
    """p: the average is taken after layers whose number (from 1) is a multiple of p."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MuddStream:
    """MUDDFormer (arXiv 2502.12170): per-token weights over earlier states, one set a way."""

    kind: Literal["mudd"] = "mudd"
    pre_post_norm: bool = False
    """PrePostDANorm: states are normed before and mixtures after mixing, and the newest state is
    added as it is; the stable choice for deep models."""
    shared_first_norm: bool = False
    """Whether layer 0, which reads the embedding in every way, has one attention norm, as in the
    MUDDFormer release, or one each for queries, keys and values."""
    expand_last: bool = False
    """Whether the hidden width of the output read's weights is four times the number of sources."""
    round64: bool = False
    """Whether hidden widths are raised to the next multiple of 64, as in the release."""

    def hidden_width(self, n_ways: int, n_sources: int, *, last: bool) -> int:
        """Hidden width of the weights of a read, whether or not it is the output read."""
        hidden = n_ways * n_sources * (4 if last and self.expand_last else 1)
        return (hidden // 64 + 1) * 64 if self.round64 else hidden


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HyperStream:
    """Hyper-Connections (arXiv 2409.19606): n parallel streams, mixed at every sublayer."""

    kind: Literal["hyper"] = "hyper"
    n_streams: int = 4
    """n, the expansion rate."""
    dynamic: bool = True
    """Whether the matrices also depend on the token."""
    tanh: bool = True
    """Whether the dynamic part passes through tanh."""
    norm: Literal["rms", "layer"] = "rms"
    """Norm of each stream before the dynamic part; its eps is fixed (fp32's machine eps for rms,
    1e-5 for layer)."""
    scaled_outputs: bool = False
    """Whether output projections start smaller by 1/sqrt(n)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeltaStream:
    """Delta Attention Residuals (arXiv 2605.18855): a softmax over sublayer outputs (or block sums)
    is added to the ordinary residual stream."""

    kind: Literal["delta"] = "delta"
    block_size: int = 4
    """Sublayers summed into one source; 1 is the full form, a source a sublayer."""


Stream = (
    ResidualStream
    | AttnResStream
    | RoleDecoupledStream
    | DenseStream
    | MuddStream
    | HyperStream
    | DeltaStream
)

REGISTERED: dict[str, type] = {}
"""Configurations of streams from outside of the package, by their ``kind``; see
:func:`satlens.register_stream`."""


def _registered(value: Any, validate: Any) -> Any:
    """A registered stream is validated by its own class, every other one as a built-in."""
    given = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    cls = REGISTERED.get(given) if isinstance(given, str) else None
    return validate(value) if cls is None else TypeAdapter(cls).validate_python(value)


AnyStream = Annotated[Annotated[Stream, Field(discriminator="kind")], WrapValidator(_registered)]


# -- the model ---------------------------------------------------------------------------------


def _derived(value: Any, validate: Any) -> Any:
    """Null stays null: ``__post_init__`` replaces it by a number."""
    return value if value is None else validate(value)


# Fields that may be given as null and are numbers once constructed.
DerivedInt = Annotated[int, WrapValidator(_derived)]
DerivedWidths = Annotated[int | tuple[int, ...], WrapValidator(_derived)]
DERIVED = cast(Any, None)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """A decoder: the backbone shared by every variant and its two extension points.

    Names follow TransformerLens where it has one. ``None`` in a field with a derived default is
    replaced on construction, so a config always states its numbers.
    """

    d_vocab: int = 2048
    """Rows of the embedding table (tokens; padded vocabularies are legal)."""
    n_ctx: int = 256
    """Longest context in tokens."""
    n_layers: int = 8
    """Decoder layers, each an attention and an MLP."""
    d_model: int = 128
    """Width of the stream."""
    n_heads: int = 4
    """Query heads."""
    n_key_value_heads: DerivedInt = DERIVED
    """Key/value heads; null means as many as query heads."""
    d_head: DerivedInt = DERIVED
    """Head width; null means d_model / n_heads."""
    d_mlp: DerivedWidths = DERIVED
    """MLP width, one for all layers or one each (0 is legal: that MLP adds nothing); null means
    8/3 d_model rounded up to a multiple of 32."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before RoPE."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    window_size: int | None = None
    """Sliding window w: query i sees keys i-w < j <= i; null means all earlier keys."""
    rope_theta: float = 10_000.0
    """Base of the rotary position embedding (half-split layout)."""
    norm_eps: float = 1e-6
    """Epsilon of every norm but qk-norm."""
    qk_norm_eps: float = 1e-5
    """Epsilon of qk-norm."""
    tied_embeddings: bool = False
    """Whether the unembedding is the embedding table."""
    document_mask: bool = True
    """Whether training on packed sequences masks attention across documents."""
    init: Literal["fan_in", "normal_0.02"] = "fan_in"
    """fan_in: linear std 0.8/sqrt(fan_in), output projections further by 1/sqrt(2 n_layers),
    embedding 0.02 sqrt(d_model), unembedding 0.02; normal_0.02: every matrix N(0, 0.02^2)."""
    value_residual: ValueResidual = Field(default=NoValueResidual(), discriminator="kind")
    """What is added to a layer's values."""
    stream: AnyStream = ResidualStream()
    """How sublayers read what earlier ones wrote."""

    def __post_init__(self) -> None:
        for name in ("d_vocab", "n_ctx", "n_layers", "d_model", "n_heads"):
            _require(getattr(self, name) > 0, name, "must be positive", getattr(self, name))
        n_kv = self.n_heads if self.n_key_value_heads is None else self.n_key_value_heads
        _require(
            n_kv > 0 and self.n_heads % n_kv == 0,
            "n_key_value_heads",
            f"must divide n_heads={self.n_heads}",
            n_kv,
        )
        if self.d_head is None:
            _require(
                self.d_model % self.n_heads == 0,
                "n_heads",
                f"must divide d_model={self.d_model}, or d_head must be given",
                self.n_heads,
            )
        d_head = self.d_head if self.d_head is not None else self.d_model // self.n_heads
        _require(d_head > 0 and d_head % 2 == 0, "d_head", "must be even (RoPE)", d_head)
        d_mlp = self.d_mlp
        if d_mlp is None:
            d_mlp = -(-(self.d_model * 8) // (3 * 32)) * 32
        if isinstance(d_mlp, tuple):
            _require(
                len(d_mlp) == self.n_layers,
                "d_mlp",
                f"must have one width for each of n_layers={self.n_layers}",
                len(d_mlp),
            )
        widths = d_mlp if isinstance(d_mlp, tuple) else (d_mlp,)
        _require(min(widths) >= 0, "d_mlp", "must not be negative", min(widths))
        if self.window_size is not None:
            _require(self.window_size > 0, "window_size", "must be positive", self.window_size)
        for name in ("norm_eps", "qk_norm_eps"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, name, "must be finite and not negative", value)
        fits = 0 < self.rope_theta < math.inf
        _require(fits, "rope_theta", "must be finite and positive", self.rope_theta)
        for name in ("block_size", "dilation", "period", "n_streams"):
            value = getattr(self.stream, name, 1)
            _require(value > 0, f"stream.{name}", "must be positive", value)
        last_k = getattr(self.value_residual, "last_k", None)
        if last_k is not None:
            _require(last_k > 0, "value_residual.last_k", "must be positive", last_k)
        for layer in getattr(self.value_residual, "layers", ()):
            _require(
                1 <= layer < self.n_layers,
                "value_residual.layers",
                f"must lie in 1..{self.n_layers - 1} (layer 0 makes V_1)",
                layer,
            )
        object.__setattr__(self, "n_key_value_heads", n_kv)
        object.__setattr__(self, "d_head", d_head)
        object.__setattr__(self, "d_mlp", d_mlp)

    # Derived facts, under the names TransformerLens code asks for.
    @property
    def normalization_type(self) -> str:
        return "RMS"

    @property
    def attn_only(self) -> bool:
        return False

    @property
    def device(self) -> Any:
        """Where the model that has this configuration is (torch.device); None outside a model."""
        return self.__dict__.get("_device")

    def on(self, device: Any) -> ModelConfig:
        """The same configuration, as that of a model on a device."""
        placed = copy(self)
        object.__setattr__(placed, "_device", device)
        return placed

    def d_mlp_of(self, layer: int) -> int:
        """MLP width of one layer."""
        return self.d_mlp[layer] if isinstance(self.d_mlp, tuple) else self.d_mlp

    @property
    def value_layers(self) -> tuple[int, ...]:
        """Layers whose values are mixed with V_1 (empty without a value residual)."""
        if isinstance(self.value_residual, NoValueResidual):
            return ()
        residual = self.value_residual
        if isinstance(residual, StaticValueResidual) and residual.mode == "sparse":
            return tuple(sorted(set(residual.layers)))
        k = residual.last_k
        first = 1 if k is None else max(1, self.n_layers - k)
        return tuple(range(first, self.n_layers))

    @property
    def variant(self) -> str:
        """Name of the architecture: its stream and its value residual."""
        values = {"none": "", "static": "resformer", "gated": "satformer"}
        streams = {
            "residual": "",
            "dense": "denseformer",
            "mudd": "muddformer",
            "hyper": "hyperconnections",
            "delta": "delta_attnres",
        }
        parts = [values[self.value_residual.kind], streams.get(self.stream.kind, self.stream.kind)]
        return "+".join(p for p in parts if p) or "transformer"

    def with_changes(self, **changes: Any) -> ModelConfig:
        """A copy with other fields; derived widths that were defaults stay as they are."""
        return make(ModelConfig, {**to_dict(self), **changes}, "ModelConfig")


# -- training ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainConfig:
    """One training run. Budgets are tokens; the same seed gives paired runs across variants."""

    tokens: Count = 614_400
    """Training budget in tokens (rounded down to whole steps)."""
    batch_size: Count = 4
    """Sequences in a micro-batch."""
    grad_accum: int = 1
    """Micro-batches in an optimiser step."""
    lr: float = 3e-3
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a share of the peak."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Decay after warm-up: cosine, or constant with a linear decay over the last fifth."""
    warmup: float = 0.05
    """Share of the steps spent in linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW coefficients."""
    weight_decay: float = 0.1
    """AdamW weight decay of the parameters not excluded."""
    no_decay: tuple[Literal["norms", "gates", "scalars", "routes", "biases"], ...] = (
        "norms",
        "gates",
        "scalars",
        "routes",
        "biases",
    )
    """Families of parameters without weight decay."""
    clip: float | None = 1.0
    """Largest gradient norm; null does not clip."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16: autocast over fp32 master weights; fp32: no autocast."""
    seed: int = 0
    """Seed of the initial weights, the data order and nothing else."""
    eval_every: Count = 100
    """Steps between evaluations on the fixed slice of the validation split."""
    eval_tokens: Count = 16_384
    """Tokens in that slice."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""
    checkpoint_every: Count = 200
    """Steps between resumable checkpoints (the last two are kept until the run is finished)."""
    milestones: tuple[Count, ...] = ()
    """Token counts at which a checkpoint is kept for good, each at the first step that reaches it;
    0 keeps the initial weights."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a non-finite loss or gradient does, always before the update: end the run, naming step
    and batch, or leave the step out and count it."""
    # How the same steps are computed: an interrupted run may go on with other values, then equal
    # to rounding instead of to the bit.
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """What processes started by torchrun share: ddp, the rows of a step; fsdp, also weights,
    gradients and optimiser (FSDP2, a unit a block)."""
    gradient_checkpointing: bool = False
    """Keep only what passes between blocks, and run each block again in the backward pass."""
    compile: bool = False
    """Compile the model in place with torch.compile."""
    data_workers: Count = 0
    """Processes that read ahead; 0 reads in the training process. The data is the same for any."""
    n_threads: int | None = None
    """Intra-op CPU threads; null leaves torch's own choice."""
    deterministic: bool = True
    """On GPUs, use deterministic kernels, without which a resumed run equals an uninterrupted one
    to rounding only. CPUs need nothing for it."""

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_size", "grad_accum", "lr", "eval_every", "eval_tokens"):
            _require(getattr(self, name) > 0, name, "must be positive", getattr(self, name))
        for name in ("log_every", "checkpoint_every"):
            _require(getattr(self, name) > 0, name, "must be positive", getattr(self, name))
        for name in ("lr", "min_lr_ratio", "weight_decay"):
            _require(
                math.isfinite(getattr(self, name)), name, "must be finite", getattr(self, name)
            )
        for name in ("seed", "data_workers"):
            _require(getattr(self, name) >= 0, name, "must not be negative", getattr(self, name))
        _require(0 <= self.warmup < 1, "warmup", "must lie in [0, 1)", self.warmup)
        for name in ("min_lr_ratio", "weight_decay"):
            _require(getattr(self, name) >= 0, name, "must not be negative", getattr(self, name))
        for beta in self.betas:
            _require(0 <= beta < 1, "betas", "must lie in [0, 1)", beta)
        for name in ("clip", "n_threads"):
            value = getattr(self, name)
            fits = value is None or 0 < value < math.inf
            _require(fits, name, "must be positive or null", value)
        for tokens in self.milestones:
            within = 0 <= tokens <= self.tokens
            _require(within, "milestones", f"must lie in 0..tokens={self.tokens}", tokens)


EXECUTION = (
    "strategy",
    "gradient_checkpointing",
    "compile",
    "data_workers",
    "n_threads",
    "deterministic",
)
"""Fields of TrainConfig that decide how steps are computed, not which steps."""


# -- construction ------------------------------------------------------------------------------

T = TypeVar("T")


def _require(condition: bool, field: str, rule: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{field}: {rule}, got {value!r}")


def make(cls: type[T], values: dict[str, Any], where: str) -> T:
    """Build a config from plain data; every fault becomes one line naming file and field.

    Raises:
        ConfigError: unknown key (with the nearest known one), wrong type, impossible value.
    """
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_fault(error, cls)}") from None


def _first_fault(error: ValidationError, cls: type) -> str:
    fault = error.errors()[0]
    path = ".".join(str(part) for part in fault["loc"])
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        key = str(fault["loc"][-1])
        known = [f.name for f in fields(cls)] if len(fault["loc"]) == 1 else _nested_fields()
        near = difflib.get_close_matches(key, known, n=1)
        return f"unknown field {path!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
    message = fault["msg"].removeprefix("Value error, ")
    return f"{path}: {message}" if path else message


def _nested_fields() -> list[str]:
    kinds = (*get_args(ValueResidual), *get_args(Stream), *REGISTERED.values())
    return list(dict.fromkeys(f.name for cls in kinds for f in fields(cls)))


def to_dict(config: Any) -> dict[str, Any]:
    """Plain JSON-ready data of a config."""
    return asdict(config)


__all__ = [
    "AttnResStream",
    "DeltaStream",
    "DenseStream",
    "GatedValueResidual",
    "HyperStream",
    "ModelConfig",
    "MuddStream",
    "NoValueResidual",
    "ResidualStream",
    "RoleDecoupledStream",
    "StaticValueResidual",
    "TrainConfig",
    "make",
    "replace",
    "to_dict",
]

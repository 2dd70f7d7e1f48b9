"""The six models of the SATFormer repository: their keys, and the tensors their reads add."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic.dataclasses import dataclass

from satlens.checkpoints.layouts.backbone import (
    BackboneKeys,
    Norms,
    head_sizes,
    one,
    refuse,
)
from satlens.checkpoints.layouts.base import Rule
from satlens.checkpoints.layouts.mudd import WAYS, mudd_reads
from satlens.checkpoints.layouts.widths import allocated, width_before_reallocation
from satlens.config import (
    STRICT,
    DenseStream,
    GatedValueResidual,
    GateFunction,
    HyperStream,
    ModelConfig,
    MuddStream,
    NoValueResidual,
    StaticValueResidual,
)

LAYOUT = "satformer_repo"


class Kind(ABC):
    """One of their ``model_type`` s."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other ``model_type`` s under which the same model was published."""
    keys: ClassVar[type[BackboneKeys]] = BackboneKeys
    attention_norms: ClassVar[Norms] = (("ln1", "attn_norm"),)

    @abstractmethod
    def fits(self, cfg: ModelConfig) -> bool:
        """Whether it is the kind to write a model as."""

    def parts(self, keys: Any) -> dict[str, Any]:
        """Their keys -> our fields, on top of the backbone's."""
        return {}

    def keys_of(self, cfg: ModelConfig) -> dict[str, Any]:
        """Our fields -> their keys, on top of the backbone's.

        Raises:
            ConfigError: a field that the kind has no place for.
        """
        return {}

    def mlp_width(self, cfg: ModelConfig) -> int | None:
        """What ``intermediate_size`` states where layers differ."""
        return None

    def rules(self, cfg: ModelConfig) -> Iterator[Rule]:
        """Tensors on top of the backbone's."""
        yield from ()


class Transformer(Kind):
    """The baseline; also what ``use_value_residual: false`` makes of the two value residuals."""

    model_type = "transformer"
    architecture = "TransformerForCausalLM"

    def fits(self, cfg: ModelConfig) -> bool:
        return cfg.variant == "transformer"


# -- value residuals -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValueKeys(BackboneKeys):
    """Keys of a value residual."""

    use_value_residual: bool = True
    value_residual_gate: GateFunction = "relu"
    value_residual_proj_bias: bool = False
    value_residual_lambda2_init: float = 0.5
    value_residual_last_k: int | None = None


_MIXING = "attn.value_residual_mixing."


class Resformer(Kind):
    """ResFormer in its mode learnable_plus."""

    model_type = "ResFormer"
    architecture = "ResFormerForCausalLM"
    keys = ValueKeys

    def fits(self, cfg: ModelConfig) -> bool:
        return cfg.variant == "resformer"

    def parts(self, keys: ValueKeys) -> dict[str, Any]:
        if not keys.use_value_residual:
            return {}
        lambda2, last_k = keys.value_residual_lambda2_init, keys.value_residual_last_k
        return {"value_residual": StaticValueResidual(lambda2_init=lambda2, last_k=last_k)}

    def keys_of(self, cfg: ModelConfig) -> dict[str, Any]:
        residual = cfg.value_residual
        assert isinstance(residual, StaticValueResidual)
        other = residual.mode != "learnable_plus"
        refuse(cfg, LAYOUT, {"value_residual.mode": other, "n_layers": cfg.n_layers == 1})
        return {
            "use_value_residual": True,
            "value_residual_last_k": residual.last_k,
            "value_residual_lambda2_init": residual.lambda2_init,
        }

    def rules(self, cfg: ModelConfig) -> Iterator[Rule]:
        for layer in cfg.value_layers:
            ours, theirs = f"blocks.{layer}.attn.values.", f"model.layers.{layer}.{_MIXING}"
            yield one(ours + "lambda2", theirs + "lambda2", (), (1,))
        if cfg.n_layers > 1:
            manager = "model.lambda_manager.lambda_"
            yield one("shared_lambda.scale", manager + "scale", (), (1,))
            yield one("shared_lambda.logits", manager + "logits", (cfg.n_layers - 1,))


class Satformer(Kind):
    """SATFormer; an earlier state of the repository calls it GatedResFormer."""

    model_type = "SATFormer"
    architecture = "SATFormerForCausalLM"
    aliases = ("GatedResFormer",)
    keys = ValueKeys

    def fits(self, cfg: ModelConfig) -> bool:
        return cfg.variant == "satformer"

    def parts(self, keys: ValueKeys) -> dict[str, Any]:
        if not keys.use_value_residual:
            return {}
        gate, bias = keys.value_residual_gate, keys.value_residual_proj_bias
        last_k = keys.value_residual_last_k
        return {"value_residual": GatedValueResidual(gate=gate, bias=bias, last_k=last_k)}

    def keys_of(self, cfg: ModelConfig) -> dict[str, Any]:
        residual = cfg.value_residual
        assert isinstance(residual, GatedValueResidual)
        return {
            "use_value_residual": True,
            "value_residual_last_k": residual.last_k,
            "value_residual_gate": residual.gate,
            "value_residual_proj_bias": residual.bias,
        }

    def rules(self, cfg: ModelConfig) -> Iterator[Rule]:
        residual = cfg.value_residual
        assert isinstance(residual, GatedValueResidual)
        for layer in cfg.value_layers:
            ours, theirs = f"blocks.{layer}.attn.values.", f"model.layers.{layer}.{_MIXING}"
            shape = (head_sizes(cfg)[1], cfg.d_model)
            yield one(ours + "alpha.weight", theirs + "alpha_proj.weight", shape)
            if residual.bias:
                yield one(ours + "alpha.bias", theirs + "alpha_proj.bias", shape[:1])


# -- depth streams ---------------------------------------------------------------------------------


def _positive(keys: Any, *names: str) -> None:
    for name in names:
        if getattr(keys, name) < 1:
            raise ValueError(f"{name}: must be positive, got {getattr(keys, name)}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DenseKeys(BackboneKeys):
    """Keys of DenseFormer."""

    dwa_dilation: int = 1
    dwa_period: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "dwa_dilation", "dwa_period")


class Denseformer(Kind):
    """DenseFormer: one row of weights after each layer that averages."""

    model_type = "denseformer"
    architecture = "DenseFormerForCausalLM"
    keys = DenseKeys

    def fits(self, cfg: ModelConfig) -> bool:
        return isinstance(cfg.stream, DenseStream)

    def parts(self, keys: DenseKeys) -> dict[str, Any]:
        return {"stream": DenseStream(dilation=keys.dwa_dilation, period=keys.dwa_period)}

    def keys_of(self, cfg: ModelConfig) -> dict[str, Any]:
        assert isinstance(cfg.stream, DenseStream)
        return {"dwa_dilation": cfg.stream.dilation, "dwa_period": cfg.stream.period}

    def rules(self, cfg: ModelConfig) -> Iterator[Rule]:
        assert isinstance(cfg.stream, DenseStream)
        for layer in range(cfg.n_layers):
            if (layer + 1) % cfg.stream.period == 0:
                n = (layer + 1) // cfg.stream.dilation + 1
                theirs = f"model.dwa_modules.alphas.{layer}.weight"
                yield one(f"blocks.{layer}.depth_weights", theirs, (1, n), (n,))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MuddKeys(BackboneKeys):
    """Keys of MUDDFormer."""

    num_ways: Literal[4] = 4
    param_realloc: bool = True
    use_pre_post_da_norm: bool = True

    @property
    def mlp_width(self) -> int:
        """Null rounds 2/3 of ``hidden_ratio`` widths to the nearest multiple of 256 here."""
        if self.intermediate_size is not None or self.hidden_ratio is None:
            return super().mlp_width
        width = int(2 * self.hidden_size * self.hidden_ratio / 3)
        return max(256, (width + 127) // 256 * 256)

    @property
    def mlp_widths(self) -> int | tuple[int, ...]:
        """After re-allocation, which needs a width or a ratio to start from."""
        stated = self.intermediate_size is not None or self.hidden_ratio is not None
        if not (self.param_realloc and stated):
            return self.mlp_width
        return allocated(self.mlp_width, self.num_hidden_layers, LAYOUT)


class Muddformer(Kind):
    """MUDDFormer, with PrePostDANorm and FFN re-allocation as options."""

    model_type = "muddformer"
    architecture = "MUDDFormerForCausalLM"
    keys = MuddKeys
    attention_norms = tuple((f"ln1_{way}", f"attn_norm_{way}") for way in "qkv")

    def fits(self, cfg: ModelConfig) -> bool:
        return isinstance(cfg.stream, MuddStream)

    def parts(self, keys: MuddKeys) -> dict[str, Any]:
        stream = MuddStream(pre_post_norm=keys.use_pre_post_da_norm)
        return {"stream": stream, "d_mlp": keys.mlp_widths}

    def mlp_width(self, cfg: ModelConfig) -> int | None:
        if not isinstance(cfg.d_mlp, tuple) or len(set(cfg.d_mlp)) == 1:
            return None
        return width_before_reallocation(cfg, LAYOUT)

    def keys_of(self, cfg: ModelConfig) -> dict[str, Any]:
        stream = cfg.stream
        assert isinstance(stream, MuddStream)
        flags = ("shared_first_norm", "expand_last", "round64")
        refuse(cfg, LAYOUT, {f"stream.{flag}": getattr(stream, flag) for flag in flags})
        return {
            "num_ways": WAYS,
            "param_realloc": self.mlp_width(cfg) is not None,
            "use_pre_post_da_norm": stream.pre_post_norm,
        }

    def rules(self, cfg: ModelConfig) -> Iterator[Rule]:
        assert isinstance(cfg.stream, MuddStream)
        d = cfg.d_model
        for read in mudd_reads(cfg):
            ours, theirs = read.ours, f"model.layers.{read.follows}.da."
            weights = read.ways * read.sources
            yield one(ours + "static", theirs + "static_weight", (read.ways, read.sources))
            yield one(ours + "w1.weight", theirs + "w1.weight", (read.hidden, d))
            yield one(ours + "w2.weight", theirs + "w2.weight", (weights, read.hidden))
            if cfg.stream.pre_post_norm:
                for side, count in (("pre", read.sources), ("post", read.ways)):
                    name = f"{theirs}{side}_da_norms."
                    parts = tuple((f"{name}{i}.weight", (d,)) for i in range(count))
                    yield Rule(ours + side, (count, d), parts)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HyperKeys(BackboneKeys):
    """Keys of Hyper-Connections."""

    expansion_rate: int = 4
    use_dynamic_hc: bool = True
    use_tanh: bool = True
    hc_norm_type: Literal["rms", "layer"] = "rms"

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "expansion_rate")


class HyperConnections(Kind):
    """Hyper-Connections, static or dynamic."""

    model_type = "dhc"
    architecture = "HyperConnectionsForCausalLM"
    keys = HyperKeys

    def fits(self, cfg: ModelConfig) -> bool:
        return isinstance(cfg.stream, HyperStream)

    def parts(self, keys: HyperKeys) -> dict[str, Any]:
        stream = HyperStream(
            n_streams=keys.expansion_rate,
            dynamic=keys.use_dynamic_hc,
            tanh=keys.use_tanh,
            norm=keys.hc_norm_type,
        )
        return {"stream": stream}

    def keys_of(self, cfg: ModelConfig) -> dict[str, Any]:
        stream = cfg.stream
        assert isinstance(stream, HyperStream)
        return {
            "expansion_rate": stream.n_streams,
            "use_dynamic_hc": stream.dynamic,
            "use_tanh": stream.tanh,
            "hc_norm_type": stream.norm,
        }

    def rules(self, cfg: ModelConfig) -> Iterator[Rule]:
        stream = cfg.stream
        assert isinstance(stream, HyperStream)
        n, d = stream.n_streams, cfg.d_model
        shapes = {"static_alpha": (n, n + 1), "static_beta": (n,)}
        their_names = {}
        if stream.dynamic:
            shapes |= {"dynamic_alpha": (d, n + 1), "dynamic_beta": (d,)}
            shapes |= {"alpha_scale": (1,), "beta_scale": (1,), "norm.weight": (d,)}
            shapes |= {"norm.bias": (d,)} if stream.norm == "layer" else {}
            their_names = {f"dynamic_{name}": f"dynamic_{name}_proj" for name in ("alpha", "beta")}
            their_names |= {f"{name}_scale": f"dynamic_{name}_scale" for name in ("alpha", "beta")}
        for layer in range(cfg.n_layers):
            for side in ("attn", "mlp"):
                ours, theirs = f"blocks.{layer}.{side}_hc.", f"model.layers.{layer}.{side}_hc."
                for name, shape in shapes.items():
                    yield one(ours + name, theirs + their_names.get(name, name), shape)


KINDS: tuple[Kind, ...] = (
    Transformer(),
    Resformer(),
    Satformer(),
    Denseformer(),
    Muddformer(),
    HyperConnections(),
)


def plain_values(cfg: ModelConfig) -> bool:
    """Whether a model has no value residual; here streams and value residuals do not compose."""
    return isinstance(cfg.value_residual, NoValueResidual)

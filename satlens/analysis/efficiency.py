"""Cost of an architecture: training speed, share of the processor's peak, activation memory.

All variants train in one process, one step each a round, so that a slow moment of the machine hits
all of them; a ratio is the median over rounds of paired ratios, with its quartiles. A second
transformer among them shows what the machine cannot resolve.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from satlens.analysis.result import Result
from satlens.config import ModelConfig, TrainConfig
from satlens.errors import AnalysisError, ConfigError
from satlens.models.decoder import Decoder
from satlens.models.presets import config_for
from satlens.provenance import provenance
from satlens.training.allocator import keep_freed_memory
from satlens.training.evaluation import autocast
from satlens.training.flops import flops_per_token
from satlens.training.optimiser import clip_gradients, make_optimiser
from satlens.training.step import MicroBatch, forward_backward

BASELINE = "transformer"
CONTROL = "transformer (again)"
Progress = Callable[[str, int, int], None]
"""Called with what is being done, rounds done and rounds in all."""

_WARM_UP = 2
_D_HEAD = 64
_PRODUCT_WIDTHS = (1024, 2048)
_BF16_CAPABILITIES = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")


class Seconds(NamedTuple):
    """What a piece of work took."""

    cpu: float
    """Processor seconds of the process, all threads."""
    wall: float


# -- public ----------------------------------------------------------------------------------------


def bench(
    *,
    variants: Sequence[str] = ("satformer", "attnres", "rd-attnres"),
    d_model: int = 128,
    n_layers: int = 8,
    n_ctx: int = 256,
    batch_size: int = 4,
    steps: int = 30,
    threads: int = 1,
    precision: str = "bf16",
    progress: Progress | None = None,
    **fields: Any,
) -> Result:
    """Training speed and memory of variants against the transformer, on the CPU.

    A step is what the trainer does: forward, backward, clipping, fused AdamW over fp32 weights.
    Statistics: ``speed_ratio`` (tokens a second over the reference's) with its quartiles as
    ends, in processor time on one thread and wall time on several; ``wall_ratio``, always wall
    time; ``tokens_per_second``; ``peak_fraction``, of the best square matrix product of the same
    precision in the same run (see
    :func:`satlens.training.flops.flops_per_token`); ``saved_mb`` and ``memory_ratio``,
    activations kept for the backward pass (:func:`saved_bytes`); ``capture_ratio``, a forward
    pass that hands all gates and routes to hooks over a bare one.

    Args:
        variants: names for :func:`satlens.build`; ``rd-*`` are also compared with ``attnres``
            when both are there.
        steps: timed rounds.
        precision: bf16 (autocast) or fp32.
        fields: further fields of every model, such as ``n_heads``; heads are 64 wide (as at the
            papers' scales) where that divides ``d_model``.

    Raises:
        ConfigError: an unknown variant, field or precision.
        AnalysisError: fewer than two rounds.
    """
    if steps < 2:
        raise AnalysisError(f"bench: steps: quartiles need at least 2 rounds, got {steps}")
    if precision not in ("bf16", "fp32"):
        raise ConfigError(f"bench: precision: expected bf16 or fp32, got {precision!r}")
    if d_model % _D_HEAD == 0:
        fields = {"n_heads": d_model // _D_HEAD, **fields}
    sizes = {"d_model": d_model, "n_layers": n_layers, "n_ctx": n_ctx, **fields}
    others = [name for name in dict.fromkeys(variants) if name != BASELINE]
    names = {BASELINE: BASELINE, CONTROL: BASELINE, **{name: name for name in others}}
    train_cfg = TrainConfig(batch_size=batch_size, precision=precision)  # type: ignore[arg-type]
    keep_freed_memory()
    with _threads(threads):
        arms = {row: Arm(config_for(name, **sizes), train_cfg) for row, name in names.items()}
        times, peak = _rounds(arms, steps, precision, progress)
    rows = []
    for row, reference in _pairs(list(arms)):
        rows.append(_row(row, reference, arms, times, peak, one_thread=threads == 1))
    settings = {**sizes, "batch_size": batch_size, "rounds": steps, "threads": threads}
    return _result(rows, {**settings, "precision": precision}, peak)


def training_speed(model_cfg: ModelConfig, train_cfg: TrainConfig, steps: int = 3) -> float:
    """Training tokens a wall-clock second of one model on the CPU: the median of a few steps."""
    keep_freed_memory()
    with _threads(train_cfg.n_threads or torch.get_num_threads()):
        arm = Arm(model_cfg, train_cfg)
        taken = [_timed(arm.step).wall for _ in range(_WARM_UP + steps)][_WARM_UP:]
    return arm.tokens * train_cfg.grad_accum / float(np.median(taken))


def saved_bytes(model: Decoder, run: Callable[[], Any]) -> int:
    """Bytes that ``run`` keeps for the backward pass: unique storages, parameters left out.

    The low-precision copies of weights that autocast makes are counted.
    """
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
        total = sum(
            tensor.untyped_storage().nbytes()
            for pointer, tensor in kept.items()
            if pointer not in parameters
        )
    del output
    return total


# -- one model -------------------------------------------------------------------------------------


class Arm:
    """A model with its optimiser and one batch of random tokens."""

    def __init__(self, model_cfg: ModelConfig, train_cfg: TrainConfig) -> None:
        self.model = Decoder(model_cfg, seed=0)
        self.cfg = train_cfg
        self.parameters = list(self.model.parameters())
        self.optimiser = make_optimiser(self.model, train_cfg)
        generator = torch.Generator().manual_seed(0)
        shape = (train_cfg.batch_size, model_cfg.n_ctx + 1)
        ids = torch.randint(0, model_cfg.d_vocab, shape, generator=generator)
        self.batch = MicroBatch(ids[:, :-1], ids[:, 1:], None, 1.0)
        self.tokens = self.batch.inputs.numel()
        self.hooks = [(site.hook, _look) for site in self.model.sites]

    def step(self) -> None:
        """One optimiser step of the trainer."""
        forward_backward(self.model, [self.batch] * self.cfg.grad_accum, self.cfg.precision)
        clip_gradients(self.optimiser, self.parameters, self.cfg.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def loss(self) -> Tensor:
        """Training's forward pass."""
        with autocast(self.model.device, self.cfg.precision):
            return self.model(self.batch.inputs, "loss", targets=self.batch.targets)

    @torch.no_grad()
    def bare(self) -> None:
        """A forward pass without the unembedding."""
        with autocast(self.model.device, self.cfg.precision):
            self.model.stream.finish(self.model, self._blocks(), False)

    @torch.no_grad()
    def capturing(self) -> None:
        """The same with every gate and route handed to a hook."""
        with (
            autocast(self.model.device, self.cfg.precision),
            self.model.hooks(fwd_hooks=self.hooks),
        ):
            self.model.stream.finish(self.model, self._blocks(), False)

    def _blocks(self) -> Any:
        depth = self.model.cfg.n_layers
        return self.model(self.batch.inputs, None, stop_at_layer=depth).state


def _look(tensor: Tensor, hook: Any) -> None:
    """A hook that costs nothing itself."""


# -- timing ----------------------------------------------------------------------------------------


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _timed(work: Callable[[], Any]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


Times = dict[str, dict[str, list[Seconds]]]
"""Seconds by arm, by kind of work (step, bare, capturing), by round."""


def _rounds(
    arms: dict[str, Arm], rounds: int, precision: str, progress: Progress | None
) -> tuple[Times, float]:
    """Interleaved timings, and the best operations a second of a matrix product among them."""
    times: Times = {row: {"step": [], "bare": [], "capturing": []} for row in arms}
    best = float("nan")
    for arm in arms.values():
        for _ in range(_WARM_UP):
            arm.step()
    order = list(arms)
    generator = np.random.default_rng(0)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for done in range(rounds):
            best = float(np.fmax(best, _product_speed(precision)))
            # A fresh order each round: whoever follows the largest model would always pay for it.
            for row in generator.permutation(order):
                arm, mine = arms[row], times[row]
                mine["step"].append(_timed(arm.step))
                if arm.hooks:
                    mine["bare"].append(_timed(arm.bare))
                    mine["capturing"].append(_timed(arm.capturing))
            gc.collect()
            if progress is not None:
                progress("bench", done + 1, rounds)
    finally:
        if collecting:
            gc.enable()
    return times, best


def _product_speed(precision: str) -> float:
    """Operations a second of the best square matrix product; NaN without bf16 instructions."""
    if precision == "bf16" and not has_bf16():
        return float("nan")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    one_thread = torch.get_num_threads() == 1
    best = 0.0
    for width in _PRODUCT_WIDTHS:
        a, b = torch.ones(width, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
        out = torch.empty_like(a)
        for _ in range(2):
            seconds = _timed(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
            taken = seconds.cpu if one_thread else seconds.wall
            best = max(best, 2 * width**3 / taken)
    return best


def has_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices itself."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _BF16_CAPABILITIES)


# -- table -----------------------------------------------------------------------------------------


def _pairs(rows: list[str]) -> Iterator[tuple[str, str]]:
    """Which arm is compared with which."""
    for row in rows:
        yield row, BASELINE
        if row.startswith("rd-attnres") and "attnres" in rows:
            yield row, "attnres"


def _quartiles(name: str, slow: np.ndarray, fast: np.ndarray) -> dict[str, float]:
    low, middle, high = np.quantile(slow / fast, (0.25, 0.5, 0.75))
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def _row(
    row: str, reference: str, arms: dict[str, Arm], times: Times, peak: float, one_thread: bool
) -> dict[str, Any]:
    """One line of the table; each paired ratio is of two timings of one round."""
    clock = 0 if one_thread else 1
    arm, mine = arms[row], {kind: np.array(t) for kind, t in times[row].items()}
    base = np.array(times[reference]["step"])
    speed = arm.tokens / float(np.median(mine["step"][:, clock]))
    saved, saved_base = (saved_bytes(a.model, a.loss) for a in (arm, arms[reference]))
    nothing = np.full(1, np.nan)
    capturing, bare = (
        mine[kind][:, clock] if arm.hooks else nothing for kind in ("capturing", "bare")
    )
    return {
        "variant": row,
        "reference": reference,
        **_quartiles("speed_ratio", base[:, clock], mine["step"][:, clock]),
        **_quartiles("wall_ratio", base[:, 1], mine["step"][:, 1]),
        "tokens_per_second": speed,
        "peak_fraction": speed * flops_per_token(arm.model.cfg) / peak,
        "saved_mb": saved / 1e6,
        "memory_ratio": saved / saved_base,
        **_quartiles("capture_ratio", capturing, bare),
        "n_parameters": float(arm.model.n_parameters()),
        "n_documents": 0,
        "n_tokens": arm.tokens * len(times[row]["step"]),
        "flags": "",
    }


def _result(rows: list[dict[str, Any]], settings: dict[str, Any], peak: float) -> Result:
    table = pd.DataFrame(rows)
    floor = table[table["variant"] == CONTROL].iloc[0]
    notes = [
        "speed_ratio: median of paired ratios of interleaved steps; its ends are quartiles, not "
        "a confidence interval.",
        f"noise floor: the transformer against itself reads {floor['speed_ratio']:.3f} "
        f"({floor['speed_ratio_low']:.3f} to {floor['speed_ratio_high']:.3f}).",
    ]
    if np.isnan(peak):
        notes.append("peak_fraction: n/a, this CPU has no bf16 matrix instructions.")
    ratios = {
        f"{row['variant']} / {row['reference']}": {
            key: row[key] for key in ("speed_ratio", "memory_ratio")
        }
        for row in rows
        if row["variant"] != BASELINE
    }
    summary = {
        **settings,
        "peak_gflops": peak / 1e9,
        "transformer_peak_fraction": rows[0]["peak_fraction"],
        "noise_floor": [floor[f"speed_ratio{end}"] for end in ("_low", "", "_high")],
        "ratios": ratios,
    }
    record = provenance(
        checkpoint=None,
        data=None,
        tokenizer=None,
        seed=0,
        n_documents=0,
        n_tokens=sum(row["n_tokens"] for row in rows),
        dtype=settings["precision"],
    )
    return Result("bench", table, record, summary, notes)

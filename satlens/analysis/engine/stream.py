"""One pass over a corpus: capture what reducers ask for, add it up, forget it.

A reducer names the hook points it reads. The pass runs the model over a fixed partition of the
data (:class:`satlens.data.windows.Windows`), no layer further than the last hook point asked for,
without logits unless a reducer scores tokens. Only one batch of activations exists at a time.
With a ``resume_dir`` the sums are stored every tenth of the batches (or five seconds), so a killed
pass continues where it was and ends with the same bits. Several processes share the batches and
merge their sums (:mod:`satlens.analysis.engine.merging`).
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

import satlens
from satlens import processes
from satlens.analysis.engine.accumulators import Accumulator, canonical, load_state, save_state
from satlens.analysis.engine.merging import merge
from satlens.analysis.stats import MAX_GROUPS, group_of
from satlens.data.windows import Batch, Windows
from satlens.errors import AnalysisError
from satlens.hooks import HookedModel, ReadOnly
from satlens.models.attention import chosen_attention
from satlens.models.decoder import Decoder
from satlens.models.identity import weights_sha256
from satlens.provenance import source_sha256

Progress = Callable[[str, int, int], None]
"""Called with what is being done, batches done and batches in all."""

Transform = Callable[[Tensor], Any]
"""What to keep of a hook point's tensor, (B, T, ...); it must not write to it."""

Made = TypeVar("Made")

SAVE_SECONDS = 5.0
_STATE_VERSION = 1
_CODE = ("config.py", "hooks.py", "data", "models", "analysis")
"""Sources that decide the numbers of a pass."""
_current: ContextVar[tuple[Windows, Batch] | None] = ContextVar("satlens_batch", default=None)


class Observed(NamedTuple):
    """One batch as a reducer sees it."""

    captured: Mapping[str, Any]
    """The reducer's hook points: tensors (B, T, ...), or what its transforms made of them."""
    batch: Batch
    """On the model's device."""
    groups: np.ndarray
    """Document group of each row, (B,)."""
    nll: Tensor | None
    """Negative log-likelihood of each target in nats, (B, T); 0 where not scored."""
    shared: dict[Any, Any] | None = None
    """What reducers of the pass made of this batch for each other, by key."""

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """``make()``, or what it gave when a reducer first asked for ``key`` in this batch."""
        if self.shared is None:
            return make()
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


class Reducer(Protocol):
    """Adds up statistics of a pass."""

    @property
    def hooks(self) -> Mapping[str, Transform | None]:
        """Hook points to capture, each with what to keep of its tensor (None keeps it whole)."""
        ...

    @property
    def needs_nll(self) -> bool:
        """Whether it reads ``Observed.nll``."""
        ...

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """Everything it adds up."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """JSON-ready settings; a stored state is used only by a reducer with equal ones."""
        ...

    def update(self, seen: Observed) -> None:
        """Add one batch."""
        ...


def run(
    model: Decoder,
    windows: Windows,
    reducers: Sequence[Reducer],
    *,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
    label: str = "analysis",
    first: int = 0,
    step: int = 1,
) -> None:
    """Feed every batch of ``windows`` to the reducers, which are updated in place.

    Args:
        progress: called with (label, batches done, batches in all).
        resume_dir: where the state of the pass is kept, that of each process apart; a later call
            with the same model, data, reducers and number of processes continues from it, a
            finished one runs no forward. None keeps nothing.
        first, step: take batches first, first + step, ...; reducers of the parts can be merged.

    Raises:
        HookError: a reducer asks for a hook point the model does not have.
        AnalysisError: ``resume_dir`` with hooks of the caller's own on the model, whose effect a
            resumed pass could not know, or a folder that cannot be written; processes that do not
            run the same pass.
    """
    names = [name for reducer in reducers for name in reducer.hooks]
    needs_nll = any(reducer.needs_nll for reducer in reducers)
    depth = max([depth_of(model, name) for name in names], default=0)
    # What several reducers ask for is kept once.
    wanted = dict.fromkeys(item for reducer in reducers for item in reducer.hooks.items())
    captured: dict[Any, Any] = {}
    hooks = [(item[0], _capturing(captured, item, item[1])) for item in wanted]

    def step_over(batch: Batch, groups: np.ndarray) -> None:
        nll = _forward(model, batch, depth, needs_nll)
        shared: dict[Any, Any] = {}
        for reducer in reducers:
            own = {item[0]: captured[item] for item in reducer.hooks.items()}
            reducer.update(Observed(own, batch, groups, nll, shared))
        captured.clear()

    accumulators = {
        f"{index}.{name}": accumulator
        for index, reducer in enumerate(reducers)
        for name, accumulator in reducer.accumulators.items()
    }
    identity = [dict(reducer.identity) for reducer in reducers]
    fold(
        model,
        windows,
        accumulators,
        step_over,
        identity=identity,
        inside=lambda: model.hooks(hooks),
        progress=progress,
        resume_dir=resume_dir,
        label=label,
        first=first,
        step=step,
    )


def fold(
    model: Decoder,
    windows: Windows,
    accumulators: Mapping[str, Accumulator],
    step_over: Callable[[Batch, np.ndarray], None],
    *,
    identity: Any,
    inside: Callable[[], Any] | None = None,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
    label: str = "analysis",
    first: int = 0,
    step: int = 1,
) -> None:
    """The resumable loop under every pass: ``step_over(batch, groups)`` for each batch in order.

    ``accumulators`` are empty when it starts and complete, in every process, when it ends.
    ``inside`` opens a context around all batches; ``identity`` is what, beside weights and data,
    decides the numbers. Other arguments and errors as :func:`run`.
    """
    world = processes.world()
    what = [identity, label, first, step]
    if world.size > 1:
        processes.check_equal(label, pass_key(model, windows, what))
    path = None
    if resume_dir is not None:
        refuse_foreign_hooks(model)
        path = state_path(model, windows, what, label, resume_dir)
    numbers = range(first, len(windows), step)[world.rank :: world.size]
    done = 0 if path is None else load_state(path, accumulators)
    every, saved_at = max(1, len(numbers) // 10), time.monotonic()
    report = progress or (lambda label, done, total: None)
    report(label, done, len(numbers))
    with ExitStack() as stack:
        if done < len(numbers):
            stack.enter_context(measuring(model))
            if inside is not None:
                stack.enter_context(inside())
        for index in range(done, len(numbers)):
            batch = windows[numbers[index]]
            groups = group_of(batch.document.numpy(), windows.n_documents)
            on_device = to_device(batch, model.device)
            with running(windows, on_device):
                step_over(on_device, groups)
            done = index + 1
            due = done % every == 0 or time.monotonic() - saved_at >= SAVE_SECONDS
            if path is not None and (due or done == len(numbers)):
                save_state(path, accumulators, done)
                saved_at = time.monotonic()
            report(label, done, len(numbers))
    merge(accumulators)


# -- forwards --------------------------------------------------------------------------------------


def depth_of(model: HookedModel, name: str) -> int:
    """Blocks that have to run before a hook point is reached; n_layers + 1 for the final read.

    Raises:
        HookError: the model has no such hook point.
    """
    model.hook_names(name)
    block = re.match(r"blocks\.(\d+)\.", name)
    if block:
        return int(block[1]) + 1
    if name == "hook_embed":
        return 0
    if name == "hook_v_first":
        return 1
    return model.cfg.n_layers + (2 if name == "hook_logits" else 1)


def _forward(model: Decoder, batch: Batch, depth: int, needs_nll: bool) -> Tensor | None:
    """As much of a forward pass as is asked for; the losses (B, T) if they are."""
    n_layers = model.cfg.n_layers
    if needs_nll:
        return model(batch.tokens, return_type="loss", targets=batch.targets, loss_per_token=True)
    if depth > n_layers + 1:
        model(batch.tokens)
        return None
    snapshot = model(batch.tokens, stop_at_layer=min(depth, n_layers))
    if depth > n_layers:
        model.stream.finish(model, snapshot.state, chosen_attention() == "eager")
    return None


def observe(
    model: Decoder, batch: Batch, hooks: Sequence[str] | Mapping[str, Transform | None]
) -> dict[str, Any]:
    """Activations of one batch at some hook points, by one forward no deeper than they need.

    Args:
        hooks: names; or names, each with what to keep of its tensor.
    """
    into: dict[Any, Any] = {}
    wanted = hooks if isinstance(hooks, Mapping) else dict.fromkeys(hooks)
    depth = max(depth_of(model, name) for name in wanted)
    with model.hooks([(name, _capturing(into, name, t)) for name, t in wanted.items()]):
        _forward(model, batch, depth, needs_nll=False)
    return into


def _capturing(into: dict[Any, Any], key: Any, transform: Transform | None) -> ReadOnly:
    """A hook that keeps what it sees under a key."""

    def look(tensor: Tensor, hook: Any) -> None:
        into[key] = tensor if transform is None else transform(tensor)

    return ReadOnly(look)


@contextmanager
def measuring(model: Decoder) -> Iterator[None]:
    """Evaluation mode, no gradients, no autocast; the model's own mode returns afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        model.train(training)


@contextmanager
def running(windows: Windows, batch: Batch) -> Iterator[None]:
    """Inside, ``batch`` of ``windows`` is what :func:`current_batch` gives."""
    token = _current.set((windows, batch))
    try:
        yield
    finally:
        _current.reset(token)


def current_batch() -> tuple[Windows, Batch] | None:
    """The batch that a pass is running and the partition it is of, for interventions that need to
    know its tokens and documents."""
    return _current.get()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device."""
    tensors = {name: value.to(device) for name, value in batch._asdict().items() if name != "index"}
    return batch._replace(**tensors)


def kept_tokens(batch: Batch) -> Tensor:
    """(B, T) tokens that count: real, not special, and not the first of their context."""
    return batch.valid & ~batch.first


def n_groups(windows: Windows) -> int:
    """Document groups of a pass."""
    return min(windows.n_documents, MAX_GROUPS)


# -- identity --------------------------------------------------------------------------------------


def pass_key(model: Decoder, windows: Windows, identity: Any) -> str:
    """SHA-256 of everything that decides the numbers of a pass."""
    content = {
        "version": _STATE_VERSION,
        "weights": weights_sha256(model),
        "data": windows.sha256,
        "windows": [windows.n_ctx, windows.batch_size, sorted(windows.special_ids)],
        "attention": chosen_attention(),
        "device": model.device.type,
        "torch": torch.__version__,
        "satlens": [satlens.__version__, source_sha256(*_CODE)],
        "identity": identity,
    }
    return hashlib.sha256(canonical(content).encode()).hexdigest()


def state_path(
    model: Decoder, windows: Windows, identity: Any, label: str, resume_dir: str | Path
) -> Path:
    """Where this process keeps the state of a pass."""
    key = pass_key(model, windows, [*identity, *processes.world()])
    return Path(resume_dir) / f"{label}-{key[:24]}.npz"


def refuse_foreign_hooks(model: Decoder) -> None:
    """A resumed pass cannot know what hooks of the caller's own do.

    Raises:
        AnalysisError: the model carries some.
    """
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        raise AnalysisError(
            "resume_dir: the model carries hooks or interventions, whose effect a resumed "
            "analysis cannot know; remove them or leave resume_dir out"
        )

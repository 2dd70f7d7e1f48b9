"""Masked attention that stays one kernel on a GPU: torch's FlexAttention.

A mask as a tensor of (T, T) costs ``scaled_dot_product_attention`` its flash kernel. FlexAttention
gets the mask as a function instead, and a list of the blocks of 128 x 128 scores in which anything
is seen: the others are never computed, so that short documents or a narrow window also save time.

Shapes: B batch, T position, H query heads, K KV heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys of a block, of which the sequence has to be whole ones: torch's default."""
WIDTHS = (16, 32, 64, 128)
"""Head widths that every GPU's kernels are made for."""
DTYPES = (torch.bfloat16, torch.float16)
MOST_SHAPES = 64
"""Kernels compiled in one process, each for its own shapes."""


def supports(length: int, d_head: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a pass without a cache can be computed here by FlexAttention's kernel.

    Narrower than what torch would try: half precision on an NVIDIA GPU from Ampere on with Triton
    installed, head widths of :data:`WIDTHS`, and a length of whole blocks.
    """
    shapes = length % BLOCK == 0 and d_head in WIDTHS
    return shapes and dtype in DTYPES and _has_kernels(device)


@cache
def _has_kernels(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return find_spec("triton") is not None


def block_mask(
    length: int,
    window: int | None,
    documents: Int[Tensor, "B T"] | None,
    device: torch.device,
) -> BlockMask:
    """Causal attention within a window and within documents, for all layers of a pass.

    Args:
        length: T.
        window: query i sees keys i - window < j <= i.
        documents: ids; attention stays within equal ids.
        device: where the pass is.
    """
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    if documents is not None:
        documents = documents.to(torch.int32)

    seen = [lambda b, h, query, key: query >= key]
    if window is not None:
        seen.append(lambda b, h, query, key: query - key < window)
    if documents is not None:
        seen.append(lambda b, h, query, key: documents[b, query] == documents[b, key])
    rows = None if documents is None else len(documents)
    return _run(create_block_mask, and_masks(*seen), rows, None, length, length, device, BLOCK)


def flex(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B K T E"],
    v: Float[Tensor, "B K T E"],
    mask: BlockMask,
    scale: float,
) -> Float[Tensor, "B H T E"]:
    """softmax(scale q k^T) v over what ``mask`` lets a query see."""
    from torch.nn.attention.flex_attention import flex_attention

    return _run(
        flex_attention,
        q,
        k,
        v,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options={"BACKEND": "TRITON"},  # deterministic, as not all that it may choose are
    )


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function compiled: uncompiled, it computes all scores."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    # Hooked passes run under a stance that would leave this uncompiled, too.
    with torch.compiler.set_stance("default"):
        return _compiled(function)(*args, **kwargs)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for each shape; too many shapes are an error and never the slow fallback."""
    how: dict[str, Any] = {"dynamic": False, "fullgraph": True, "recompile_limit": MOST_SHAPES}
    return torch.compile(function, **how)

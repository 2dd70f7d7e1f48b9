"""Several processes on one evaluation, as torchrun starts them.

lm-eval gives each process its share of a task's questions and gathers what they found in the first.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
from typing import Any, Self

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.utils import simple_parse_args_string

_logger = logging.getLogger(__name__)

# What lm-eval's command says where --device is not given.
_UNASKED = "cuda:0"

PATIENCE = datetime.timedelta(days=1)
"""How long a process waits for the others; one that fails ends all of them through torchrun."""


class SharedLM(TemplateLM):
    """A model that one process of several holds; it joins them over gloo if nobody has."""

    def __init__(self) -> None:
        super().__init__()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=PATIENCE)
        if dist.is_available() and dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> Self:
        """As lm-eval makes one from ``key=value,...``."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> Self:
        """As lm-eval makes one.

        Args:
            arg_dict: the model's arguments, which come first.
            additional_config: lm-eval's own batch size and device. Its ``cuda:0``, which it also
                says where nobody did, is each process's own GPU, and the CPU without one.
        """
        given = {
            key: value for key, value in (additional_config or {}).items() if value is not None
        }
        if given.get("device") == _UNASKED and "device" not in arg_dict:
            given["device"] = "cuda" if torch.cuda.is_available() else "cpu"
            _logger.warning("device: %s", given["device"])
        return cls(**{**given, **arg_dict})

    def own_device(self, device: str) -> str:
        """``cuda`` as the GPU of this process; other devices as they are."""
        if device == "cuda" and self.world_size > 1:
            return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
        return device

    def gathered(self, what: Any) -> list[Any]:
        """What each process gives, in all of them."""
        if self.world_size == 1:
            return [what]
        everybody: list[Any] = [None] * self.world_size
        dist.all_gather_object(everybody, what)
        return everybody

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tensors of all processes, one after the other; numbers as a vector."""
        if self.world_size == 1:
            return tensor
        return torch.cat([torch.atleast_1d(each) for each in self.gathered(tensor.cpu())])

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Objects of all processes in process ``dst``, None in the others."""
        everybody = self.gathered(obj)
        return everybody if self.rank == dst else None


def leave() -> None:
    """End this process, whose work is done, without taking it apart.

    Nobody closes its connections while another still reads from them, and an interpreter that ends
    itself after gloo ran can be aborted by one of its threads, which torchrun takes for a failure.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

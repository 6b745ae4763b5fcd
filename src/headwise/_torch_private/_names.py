"""Private names of torch: those that nothing can be done without, and what its CPU can do."""

from typing import Any

import torch

from headwise.errors import UnsupportedError


def required(owner: Any, name: str) -> Any:
    """A private part of torch.

    Raises:
        UnsupportedError: this version of torch has none of that name.
    """
    part = getattr(owner, name, None)
    if part is None:
        raise UnsupportedError(
            f"headwise: torch {torch.__version__} has no {name}, which this call needs. "
            f"Install torch 2.11 to 2.13, or a newer headwise."
        )
    return part


def cpu_multiplies_bfloat16_tiles() -> bool:
    """Whether this CPU has AMX; False where this version of torch does not say."""
    is_supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return is_supported is not None and bool(is_supported())

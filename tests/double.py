"""A model entirely in float64, although Hugging Face's code casts to float32 in places."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Double(TorchFunctionMode):
    """Replace float32, and the default dtype, by float64."""

    def __enter__(self) -> "Double":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {name: _double(value) for name, value in (kwargs or {}).items()}
        if func is Tensor.float:
            func = Tensor.double
        return func(*map(_double, args), **kwargs)


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def doubled(model: nn.Module) -> nn.Module:
    """The model in float64; experts use the plain loop, which supports float64."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.double()

"""Make a model that its configuration has built smaller: other shapes of weights, other counts.

`headwise.save(format="remote-code")` copies this file into checkpoints: it needs torch alone.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

OF_CONFIG = "config."
# Where T5 and its kin keep the position biases of a stack, in its first layer.
TABLE = "relative_attention_bias"


class LayerConfig:
    """A configuration with a few values of one layer's own; in all else it follows the model's.

    A copy would not follow when the model is told to attend by other means.
    """

    def __init__(self, whole: Any, own: dict[str, int]) -> None:
        self.__dict__.update(_whole=whole, _own=own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_own" not in self.__dict__:
            raise AttributeError(name)
        own: dict[str, int] = self.__dict__["_own"]
        return own[name] if name in own else getattr(self.__dict__["_whole"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._whole, name, value)


def set_count(module: nn.Module, name: str, count: int) -> None:
    """Set a count of one module; `config.` before its name means that of its configuration."""
    if not name.startswith(OF_CONFIG):
        setattr(module, name, count)
        return
    if not isinstance(module.config, LayerConfig):
        module.config = LayerConfig(module.config, {})  # type: ignore[assignment]
    own: dict[str, int] = module.config.__dict__["_own"]
    own[name.removeprefix(OF_CONFIG)] = count


def resize(module: nn.Module) -> None:
    """Let a linear layer or a table tell the sizes of its weight."""
    if isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif hasattr(module, "nf"):
        module.nx, module.nf = module.get_parameter("weight").shape  # type: ignore[assignment]


class OwnHeads:
    """Gives an attention its heads of the position biases that the model makes for all it had.

    Where an attention hands its biases on to the next one (T5 and its kin), it goes on handing on
    those of all heads.

    Args:
        heads: Which of them are its own, in their order.
        n_heads: How many there were.
    """

    _NAMES = ("alibi", "position_bias", "attention_mask")

    def __init__(self, heads: Sequence[int], n_heads: int) -> None:
        self.heads, self.n_heads = [*heads], n_heads
        self._whole: torch.Tensor | None = None  # the biases of all heads, during a call

    @classmethod
    def on(cls, module: nn.Module) -> "OwnHeads | None":
        """Those of a module, if it has got some."""
        hooks = module._forward_pre_hooks.values()
        return next((hook for hook in hooks if isinstance(hook, cls)), None)

    def put_on(self, module: nn.Module) -> None:
        """Let a module be given its heads whenever it is called, in place of what it had."""
        before = OwnHeads.on(module)
        if before is not None:
            before.heads, before.n_heads = self.heads, self.n_heads
            return
        module.register_forward_pre_hook(self, with_kwargs=True)
        if hands_on(module):
            module.register_forward_hook(self.for_others)
            if module.has_relative_attention_bias:
                module.get_submodule(TABLE).register_forward_hook(self.of_table)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = inspect.signature(type(module).forward).parameters
        places = [*names][1:]  # without self
        if hands_on(module):
            self._whole = kwargs.get("position_bias")
        chosen = tuple(self.of(name, x) for name, x in zip(places, args, strict=False))
        return chosen, {name: self.of(name, x) for name, x in kwargs.items()}

    def of(self, name: str, x: Any) -> Any:
        """The own heads of an argument, if it is for all heads: `[B, H, ...]` or `[B * H, ...]`."""
        if name not in self._NAMES or not isinstance(x, torch.Tensor):
            return x
        if x.ndim == 4 and x.shape[1] == self.n_heads:
            return x[:, self.heads]
        if x.ndim == 3 and x.shape[0] % self.n_heads == 0 and name != "attention_mask":
            return x.reshape(-1, self.n_heads, *x.shape[1:])[:, self.heads].flatten(0, 1)
        return x

    def of_table(self, table: nn.Module, args: Any, biases: torch.Tensor) -> torch.Tensor:
        """The own heads of biases `[T, S, H]` that a module makes for its whole stack."""
        self._whole = biases.permute(2, 0, 1)[None]
        return biases[..., self.heads]

    def for_others(self, module: nn.Module, args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a module gives, with the biases of all heads; those that nobody made are zeros."""
        given, own, *more = output
        whole, self._whole = self._whole, None
        if whole is None:
            whole = own.new_zeros(1, self.n_heads, *own.shape[2:])
        return given, whole, *more


def hands_on(module: nn.Module) -> bool:
    """Whether an attention gives the position biases of its stack to the one after it."""
    names = inspect.signature(type(module).forward).parameters
    return hasattr(module, "has_relative_attention_bias") and "position_bias" in names


def shrink(
    model: nn.Module,
    tensors: Mapping[str, Sequence[int]],
    counts: Mapping[str, Mapping[str, int]],
    heads: Mapping[str, Sequence[int]],
) -> None:
    """Give weights their shapes, empty, and modules their counts. A bias may be a further one.

    Args:
        heads: Of each module that is given position biases of all heads: how many these are, and
            then which are its own.
    """
    for name, shape in tensors.items():
        place, _, weight = name.rpartition(".")
        module = model.get_submodule(place)
        like = getattr(module, weight, None)
        like = module.get_parameter("weight") if like is None else like
        empty = torch.empty(*shape, dtype=like.dtype, device=like.device)
        setattr(module, weight, nn.Parameter(empty, requires_grad=like.requires_grad))
        resize(module)
    for name, own in counts.items():
        for key, count in own.items():
            set_count(model.get_submodule(name), key, count)
    for name, (n_heads, *own_heads) in heads.items():
        OwnHeads(own_heads, n_heads).put_on(model.get_submodule(name))

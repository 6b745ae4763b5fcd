"""Resize the weights of a model that its configuration has built, and set its numbers of heads.

`headwise.save(format="remote-code")` copies this file into checkpoints, so it imports torch alone.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

CONFIG_PREFIX = "config."
# Where T5 and its relatives keep the position biases of a stack, in its first layer.
BIAS_TABLE = "relative_attention_bias"


class LayerConfig:
    """The configuration of a model with a few values of one layer; the others stay linked.

    A copy would miss later changes of the model's configuration, such as another implementation
    of attention.
    """

    def __init__(self, model_config: Any, overrides: dict[str, int]) -> None:
        self.__dict__.update(_model_config=model_config, _overrides=overrides)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_overrides" not in self.__dict__:
            raise AttributeError(name)
        overrides: dict[str, int] = self.__dict__["_overrides"]
        return overrides[name] if name in overrides else getattr(self._model_config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model_config, name, value)


def set_count(module: nn.Module, name: str, count: int) -> None:
    """Set a number of one module, or of its configuration if `name` begins with `config.`."""
    if not name.startswith(CONFIG_PREFIX):
        setattr(module, name, count)
        return
    if not isinstance(module.config, LayerConfig):
        module.config = LayerConfig(module.config, {})  # type: ignore[assignment]
    overrides: dict[str, int] = module.config.__dict__["_overrides"]
    overrides[name.removeprefix(CONFIG_PREFIX)] = count


def update_sizes(module: nn.Module) -> None:
    """Set the sizes that a linear layer, an embedding or a norm stores to those of its weight."""
    if isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and module.affine:
        module.num_features = len(module.weight)
    elif hasattr(module, "nf"):
        module.nx, module.nf = module.get_parameter("weight").shape  # type: ignore[assignment]


class BiasHeads:
    """A hook that selects the kept heads of position biases that the model makes for all heads.

    Where an attention returns its biases for the next layer (T5 and its relatives), it still
    returns those of all heads.

    Args:
        heads: The kept heads, in order.
        n_heads: How many heads the biases are for.
    """

    _NAMES = ("alibi", "position_bias", "attention_mask")
    _ATTRIBUTE = "headwise_bias_heads"  # of the module that the hook is on

    def __init__(self, heads: Sequence[int], n_heads: int) -> None:
        self.heads, self.n_heads = [*heads], n_heads
        self._all_biases: torch.Tensor | None = None  # during a call

    @classmethod
    def on(cls, module: nn.Module) -> "BiasHeads | None":
        """The hook of a module, if it has one."""
        hook = getattr(module, cls._ATTRIBUTE, None)
        return hook if isinstance(hook, cls) else None

    def put_on(self, module: nn.Module) -> None:
        """Select these heads in each call of a module, in place of those selected before."""
        before = BiasHeads.on(module)
        if before is not None:
            before.heads, before.n_heads = self.heads, self.n_heads
            return
        setattr(module, self._ATTRIBUTE, self)
        module.register_forward_pre_hook(self, with_kwargs=True)
        if returns_biases(module):
            module.register_forward_hook(self.return_all)
            if module.has_relative_attention_bias:
                module.get_submodule(BIAS_TABLE).register_forward_hook(self.select_from_table)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        parameters = inspect.signature(type(module).forward).parameters
        names = [*parameters][1:]  # without self
        if returns_biases(module):
            self._all_biases = kwargs.get("position_bias")
        selected = tuple(self.select(name, x) for name, x in zip(names, args, strict=False))
        return selected, {name: self.select(name, x) for name, x in kwargs.items()}

    def select(self, name: str, x: Any) -> Any:
        """The kept heads of an argument `[B, H, ...]` or `[B * H, ...]`; any other unchanged."""
        if name not in self._NAMES or not isinstance(x, torch.Tensor):
            return x
        if x.ndim == 4 and x.shape[1] == self.n_heads:
            return x[:, self.heads]
        if x.ndim == 3 and x.shape[0] % self.n_heads == 0 and name != "attention_mask":
            return x.reshape(-1, self.n_heads, *x.shape[1:])[:, self.heads].flatten(0, 1)
        return x

    def select_from_table(self, table: nn.Module, args: Any, biases: torch.Tensor) -> torch.Tensor:
        """The kept heads of biases `[T, S, H]` that a layer makes for its whole stack."""
        self._all_biases = biases.permute(2, 0, 1)[None]
        return biases[..., self.heads]

    def return_all(self, module: nn.Module, args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        """The output with the biases of all heads: zeros if no layer has made any."""
        attended, biases, *more = output
        all_biases, self._all_biases = self._all_biases, None
        if all_biases is None:
            all_biases = biases.new_zeros(1, self.n_heads, *biases.shape[2:])
        return attended, all_biases, *more


def returns_biases(module: nn.Module) -> bool:
    """Whether an attention returns the position biases of its stack for the next layer."""
    names = inspect.signature(type(module).forward).parameters
    return hasattr(module, "has_relative_attention_bias") and "position_bias" in names


def is_bias_table(name: str) -> bool:
    """Whether a weight holds the position biases that a layer makes for its whole stack."""
    return BIAS_TABLE in name.split(".")


def shrink(
    model: nn.Module,
    tensors: Mapping[str, Sequence[int]],
    counts: Mapping[str, Mapping[str, int]],
    heads: Mapping[str, Sequence[int]],
) -> None:
    """Give weights new shapes, uninitialized, and modules new counts. Biases may be added.

    Args:
        heads: Per module that receives position biases of all heads: their number, then the
            heads that it keeps.
    """
    for name, shape in tensors.items():
        parent, _, weight = name.rpartition(".")
        module = model.get_submodule(parent)
        like = getattr(module, weight, None)
        like = module.get_parameter("weight") if like is None else like
        empty = torch.empty(*shape, dtype=like.dtype, device=like.device)
        setattr(module, weight, nn.Parameter(empty, requires_grad=like.requires_grad))
        update_sizes(module)
    for name, module_counts in counts.items():
        for key, count in module_counts.items():
            set_count(model.get_submodule(name), key, count)
    for name, (n_heads, *kept) in heads.items():
        BiasHeads(kept, n_heads).put_on(model.get_submodule(name))

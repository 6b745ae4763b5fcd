"""Private attributes of modules: hooks, fast paths, and what `torch.compile` has wrapped."""

from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

# The attribute in which `torch.compile` keeps the module that it wraps.
_WRAPPED = "_orig_mod"
# What runs while a module is called: its variables `self`, `args` and `kwargs` are the call.
MODULE_CALL: CodeType | None = getattr(
    getattr(nn.Module, "_call_impl", nn.Module.__call__), "__code__", None
)


class WithoutFastPath:
    """A stand-in for `nn.MultiheadAttention` that the layers of torch do not bypass.

    Their fast path is for modules with other values of these attributes.
    """

    in_proj_bias = None
    _qkv_same_embed_dim = False


def has_joined_weight(layer: nn.MultiheadAttention) -> bool:
    """Whether one weight holds the projections of queries, keys and values."""
    return bool(layer._qkv_same_embed_dim)


def forward_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The hooks that are called before a module's `forward`, by their numbers, in order."""
    return dict(module._forward_pre_hooks)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether anything is called before or after a module's `forward`."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def call_forward_pre_hooks(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, skip: set[int]
) -> None:
    """Call the hooks not in `skip`, for a call of the module that is already running."""
    for number, hook in forward_pre_hooks(module).items():
        if number not in skip:
            has_kwargs = number in module._forward_pre_hooks_with_kwargs
            hook(module, args, kwargs) if has_kwargs else hook(module, args)


def always_call_after(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Call a hook after a module's `forward`, also where that raises an exception.

    Compiled code guards the numbers of such hooks, which torch counts up: with numbers that come
    again, what was compiled beside earlier hooks is used again.
    """
    number = min([0, *module._forward_hooks_always_called]) - 1
    module._forward_hooks[number] = hook
    module._forward_hooks_always_called[number] = True


def remove_hooks(module: nn.Module, is_removed: Callable[[Any], bool]) -> None:
    """Remove some of the hooks that are called before or after a module's `forward`."""
    pre = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    post = (
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )
    for hooks, *options in (pre, post):
        for number in [number for number, hook in hooks.items() if is_removed(hook)]:
            for option in options:
                option.pop(number, None)
            del hooks[number]  # last: a hook that an interrupt leaves is found and removed again


def replace_submodule(module: nn.Module, name: str, value: Any) -> None:
    """Replace a submodule by any object; plain assignment refuses what is not a module."""
    module._modules[name] = value


def wrapped_by_compiler(model: nn.Module) -> nn.Module | None:
    """The module that `torch.compile` has wrapped; None if this is no such wrapper."""
    return model._modules.get(_WRAPPED)


def compiled_function(function: Any) -> Any:
    """What `torch.compile` has made a function of; None if it has not made this one."""
    return getattr(function, "_torchdynamo_orig_callable", None)

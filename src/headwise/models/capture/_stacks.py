"""Which stack of layers each module of a model belongs to, according to its qualified name."""

import re

from torch import nn

from headwise.layer import HeadAttention

Path = tuple[str, ...]

# Parts of the names of cross-attention and of self-attention modules.
_CROSS = ("cross", "encoder_attn", "encdec")
_SELF = "self"
_SUFFIX = re.compile(r"_(model|tower)(?=\.|$)")


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention module, according to its class."""
    name = type(module).__name__.lower()
    known = isinstance(module, nn.MultiheadAttention | HeadAttention)
    return known or "attention" in name or "attn" in name


def _belongs_to_attention(name: str, module: nn.Module) -> bool:
    """Whether a module belongs to an attention, according to its own name or its class."""
    last = name.rsplit(".", 1)[-1].lower()
    return is_attention(module) or "attention" in last or "attn" in last


class Stacks:
    """The stacks of one model: its encoder and decoder, or its towers for text and images.

    A stack is a part of the model that holds numbered layers with attention. A model with a
    single such part has one stack, named "".

    Attributes:
        roots: The module of each stack, by the stack's name; empty if there is one stack.
    """

    def __init__(self, model: nn.Module) -> None:
        attending = [
            name for name, module in model.named_modules() if _belongs_to_attention(name, module)
        ]
        parents = {_parent_of_layers(name) for name in attending if _is_numbered(name)}
        paths = [path for path in parents if not any(_within(path, outer) for outer in parents)]
        self._paths = _named(_shortest_distinct(paths)) if len(paths) > 1 else {}
        self.roots = {
            name: model.get_submodule(".".join(root)) for name, root in self._paths.items()
        }

    def of(self, module_name: str, cross: bool) -> str:
        """The stack of a module; that of cross-attention is another one."""
        parts = tuple(module_name.split("."))
        stacks = [name for name, root in self._paths.items() if parts[: len(root)] == root]
        return ".".join([*stacks, "cross"] if cross else stacks)


def cross_by_name(module_name: str) -> bool | None:
    """Whether a module is cross-attention; None if its name does not say."""
    for part in reversed(module_name.lower().split(".")):
        is_cross = any(word in part for word in _CROSS)
        if is_cross or (_SELF in part and part != _SELF):  # BERT's cross-attention has a "self"
            return is_cross
    return None


def _is_numbered(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _parent_of_layers(name: str) -> Path:
    """The path of the module that holds the numbered list of layers."""
    parts = tuple(name.split("."))
    first = [part.isdigit() for part in parts].index(True)
    return parts[: max(0, first - 1)]


def _within(path: Path, outer: Path) -> bool:
    return path != outer and path[: len(outer)] == outer


def _common(a: Path, b: Path) -> int:
    """The number of leading parts that two paths share."""
    equal = [part == part_of_b for part, part_of_b in zip(a, b, strict=False)]
    return [*equal, False].index(False)


def _shortest_distinct(paths: list[Path]) -> list[Path]:
    """The shortest prefix of each path that no other path shares."""
    return [p[: 1 + max(_common(p, q) for q in paths if q != p)] for p in paths]


def _named(roots: list[Path]) -> dict[str, Path]:
    """The paths by their shortest distinct names, without suffixes such as `_model`."""
    shared = min(_common(a, b) for a in roots for b in roots)
    names = [".".join(root[shared:]).lower() for root in roots]
    short = [_SUFFIX.sub("", name) for name in names]
    return dict(zip(short if len(set(short)) == len(names) else names, roots, strict=True))

"""The sites where heads attend, and the stack of layers that each belongs to, by its name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from headwise.layer import HeadAttention
from headwise.tables import Head

Path = tuple[str, ...]

# Parts of the names of cross-attention and of self-attention modules.
_CROSS = ("cross", "encoder_attn", "encdec")
_SELF = "self"
_SUFFIX = re.compile(r"_(model|tower)(?=\.|$)")


@dataclass(frozen=True, eq=False)  # sites are looked up at every call, by identity
class Site:
    """A place in a model where heads attend, or where attention is expected but not captured.

    Attributes:
        name: The module's qualified name.
        stack: The stack it belongs to; empty if the model has one.
        layer: Its index in that stack, in the order in which layers are called; -1 if no call
            was captured.
        cross: Whether its keys belong to another text than its queries.
        watched: How its calls are captured; or why none was, beginning with "not".
        kernel: What computes the model's own output.
        statistics: What computes its statistics.
        coverage: Which of a text's queries its latest pass captured: all of them, some (the rest of
            a block-sparse attention is not read, say), or all within windows.
        first_head: The number of the first head that this process computes, above 0 under tensor
            parallelism.
    """

    name: str
    stack: str
    layer: int = -1
    n_heads: int = 0
    n_kv_heads: int = 0
    cross: bool = False
    watched: str = "not called"
    kernel: str = ""
    statistics: str = ""
    coverage: str = ""
    first_head: int = 0

    def heads(self) -> tuple[Head, ...]:
        numbers = range(self.first_head, self.first_head + self.n_heads)
        return tuple(Head(self.stack, self.layer, head) for head in numbers)

    def kv_heads(self) -> list[int]:
        """The key/value head that each head reads."""
        share = self.n_heads // self.n_kv_heads
        return [n // share for n in range(self.first_head, self.first_head + self.n_heads)]


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention module, according to its class."""
    name = type(module).__name__.lower()
    known = isinstance(module, nn.MultiheadAttention | HeadAttention)
    return known or "attention" in name or "attn" in name


def _belongs_to_attention(name: str, module: nn.Module) -> bool:
    """Whether a module belongs to an attention, according to its own name or its class."""
    last = name.rsplit(".", 1)[-1].lower()
    return is_attention(module) or "attention" in last or "attn" in last


def find_stacks(model: nn.Module) -> dict[str, str]:
    """The stacks of a model: its encoder and decoder, or its towers for text and images.

    A stack is a part of the model that holds numbered layers with attention. A model with a
    single such part has one stack, named "".

    Returns:
        The qualified name of the module that holds each stack, by the stack's name; empty if there
        is one stack.
    """
    attending = [
        name for name, module in model.named_modules() if _belongs_to_attention(name, module)
    ]
    parents = {_parent_of_layers(name) for name in attending if _is_numbered(name)}
    paths = [path for path in parents if not any(_within(path, outer) for outer in parents)]
    return _named(_shortest_distinct(paths)) if len(paths) > 1 else {}


def stack_of(stacks: Mapping[str, str], module_name: str, cross: bool) -> str:
    """The stack of a module; that of cross-attention is another one."""
    names = [name for name, root in stacks.items() if f"{module_name}.".startswith(f"{root}.")]
    return ".".join([*names, "cross"] if cross else names)


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


def _named(roots: list[Path]) -> dict[str, str]:
    """The roots by their shortest distinct names, without suffixes such as `_model`."""
    shared = min(_common(a, b) for a in roots for b in roots)
    names = [".".join(root[shared:]).lower() for root in roots]
    short = [_SUFFIX.sub("", name) for name in names]
    paths = map(".".join, roots)
    return dict(zip(short if len(set(short)) == len(names) else names, paths, strict=True))

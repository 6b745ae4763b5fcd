"""The stacks of a model, such as encoder and decoder, by the names of its modules."""

import re
from collections.abc import Mapping

from torch import nn

from headwise.capture._attention_modules import is_attention

Path = tuple[str, ...]
_SUFFIX = re.compile(r"_(model|tower)(?=\.|$)")


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


def _belongs_to_attention(name: str, module: nn.Module) -> bool:
    """Whether a module belongs to an attention, according to its own name or its class."""
    last = name.rsplit(".", 1)[-1].lower()
    return is_attention(module) or "attention" in last or "attn" in last


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

"""Which stack of layers each module of a model belongs to, told from where it stands."""

import re

from torch import nn

from headwise.layer import HeadAttention

Path = tuple[str, ...]

# How modules call their attention to another text, and to their own.
_CROSS = ("cross", "encoder_attn", "encdec")
_OWN = "self"
_SUFFIX = re.compile(r"_(model|tower)(?=\.|$)")


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention, as far as its class says."""
    name = type(module).__name__.lower()
    known = isinstance(module, nn.MultiheadAttention | HeadAttention)
    return known or "attention" in name or "attn" in name


def _attends(name: str, module: nn.Module) -> bool:
    """Whether a module belongs to an attention, as far as its own name or its class says."""
    last = name.rsplit(".", 1)[-1].lower()
    return is_attention(module) or "attention" in last or "attn" in last


class Stacks:
    """The stacks of one model: its encoder and decoder, or the towers that read text and images.

    Each is a part of the model that holds numbered layers with attention, beside another such
    part. A model with one of them has one stack, named "".

    Attributes:
        roots: The module of each stack, by the stack's name; empty where there is one stack.
    """

    def __init__(self, model: nn.Module) -> None:
        attending = [name for name, module in model.named_modules() if _attends(name, module)]
        holders = {_holder(name) for name in attending if _is_numbered(name)}
        paths = [one for one in holders if not any(_within(one, other) for other in holders)]
        self._paths = _named(_apart(paths)) if len(paths) > 1 else {}
        self.roots = {
            name: model.get_submodule(".".join(root)) for name, root in self._paths.items()
        }

    def of(self, module_name: str, cross: bool) -> tuple[str, bool]:
        """The stack of a module, and whether it attends to another text; its name knows best."""
        parts = tuple(module_name.split("."))
        found = [name for name, root in self._paths.items() if parts[: len(root)] == root]
        for part in reversed(module_name.lower().split(".")):
            across = any(word in part for word in _CROSS)
            if across or (_OWN in part and part != _OWN):  # plain "self" is cross too in BERT
                cross = across
                break
        return ".".join([*found, "cross"] if cross else found), cross


def _is_numbered(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _holder(name: str) -> Path:
    """The path of the module that holds the list in which a layer is numbered."""
    parts = tuple(name.split("."))
    first = [part.isdigit() for part in parts].index(True)
    return parts[: max(0, first - 1)]


def _within(one: Path, other: Path) -> bool:
    return one != other and one[: len(other)] == other


def _common(one: Path, other: Path) -> int:
    """How many parts two paths begin with alike."""
    alike = [a == b for a, b in zip(one, other, strict=False)]
    return [*alike, False].index(False)


def _apart(paths: list[Path]) -> list[Path]:
    """Each path as short as it can be without being the beginning of another."""
    return [p[: 1 + max(_common(p, other) for other in paths if other != p)] for p in paths]


def _named(roots: list[Path]) -> dict[str, Path]:
    """Paths by what sets them apart, in words that say no more than they must."""
    shared = min(_common(root, other) for root in roots for other in roots)
    names = [".".join(root[shared:]).lower() for root in roots]
    short = [_SUFFIX.sub("", name) for name in names]
    return dict(zip(short if len(set(short)) == len(names) else names, roots, strict=True))

"""A rule in the kernel's words: windows and lengths as numbers, the rest as arrays."""

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.kernels._bias import Bias, Given
from headwise.kernels._rule import Rule, check_rule
from headwise.kernels.native._filling import Filling
from headwise.masks import Parts, Tile

# No window reaches so far, and sums with it stay far from 2**63.
NO_LIMIT = 1 << 40
# Entries of a mask or bias that are written out for the kernel: what one cell of rows may hold.
WRITTEN = 1 << 22
# Beyond its end the kernel may read as many numbers of a table as a strip has queries.
MARGIN = 64


def cannot_follow(rule: Rule, T: int, S: int) -> str | None:
    """Why the kernel does not follow a rule; None: it does."""
    parts = Parts.of(rule.visible, T, S)
    for name, part, given in (
        ("mask", parts.rest, parts.whole),
        ("bias", *_given(rule.bias)),
    ):
        if part is None or given:
            continue
        texts, heads = part.batch
        if texts * heads * T * S > WRITTEN:
            return f"a {name} of {texts} x {heads} x {T} x {S} entries would have to be written out"
    return None


def _given(bias: Bias | None) -> tuple[Bias | None, bool]:
    """What of a bias has to be an array, and whether it is one already."""
    parts = [part for part in bias.parts if not part.by_distance] if bias is not None else []
    if not parts:
        return None, False
    one = parts[0]
    for part in parts[1:]:
        one = one + part
    return one, isinstance(one, Given)


def give_rule(filling: Filling, rule: Rule) -> None:
    """Fill in everything about a problem but its queries, keys and values."""
    check_rule(rule, filling.inputs["q"])
    filling.number("scale", rule.scale)
    filling.number("softcap", rule.softcap or 0.0)
    if rule.sinks is not None:
        sinks = rule.sinks.detach().float().contiguous()
        filling.give("sinks", sinks, (filling.sizes["H"],))
    _give_mask(filling, rule)
    if rule.bias is not None:
        _give_bias(filling, rule.bias)


def _give_mask(filling: Filling, rule: Rule) -> None:
    B, H, T, S = (filling.sizes[name] for name in "BHTS")
    parts = Parts.of(rule.visible, T, S)
    left, right = parts.window.left, parts.window.right
    filling.number("left", NO_LIMIT if left is None else left)
    filling.number("right", NO_LIMIT if right is None else right)
    if parts.key_range is not None:
        filling.give("key_range", parts.key_range.expand(B, 2).contiguous(), (B, 2), torch.int64)
    if parts.documents is not None:
        _, numbers = torch.unique(parts.documents, return_inverse=True)
        numbers = numbers.to("cpu", torch.int32).expand(B, S).contiguous()
        filling.give("documents", numbers, (B, S), torch.int32)
    mask = parts.dense(T, S)
    if mask is not None:
        filling.give(
            "mask", _spread(mask, B, H, T, S).view(torch.uint8), (B, H, T, S), torch.uint8, 3
        )


def _give_bias(filling: Filling, bias: Bias) -> None:
    B, H, T, S = (filling.sizes[name] for name in "BHTS")
    tables = [_table(part, T, S) for part in bias.parts if part.by_distance]
    if tables:
        table = sum(tables[1:], tables[0])
        padded = torch.nn.functional.pad(table, (0, MARGIN)).expand(B, H, -1)
        filling.give("by_distance", padded, (B, H, T + S - 1 + MARGIN), steps=2)
    given, _ = _given(bias)
    if given is not None:
        values = given.tile(Tile.whole(T, S)).detach().float()
        filling.give("bias", _spread(values, B, H, T, S), (B, H, T, S), steps=3)


def _spread(x: Tensor, B: int, H: int, T: int, S: int) -> Tensor:
    """Broadcast by steps of 0, but for the last axis, which is dense."""
    x = x.to("cpu")
    if x.shape[-1] != S or (S > 1 and x.stride(-1) != 1):
        x = x.expand(*x.shape[:3], S).contiguous()
    return x.expand(B, H, T, S)


def _table(bias: Bias, T: int, S: int) -> Float[Tensor, "#B #H n"]:
    """A bias by distance alone: entry `S - 1 + i - j` is that of query `i` and key `j`."""
    n = T + S - 1
    line = bias.tile(Tile(n, n, range(S - 1, S), range(n), torch.device("cpu")))
    return line[:, :, 0].detach().float().flip(-1)

"""Masks of the attention implementation: rules that say what transformers' own tensors say."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import eager_mask, sdpa_mask

from headwise.attention import RuleMask
from headwise.attention.huggingface import _masks, attention_mask
from headwise.masks import causal, padding
from headwise.masks.parts import MaskParts

B, T = 3, 7
CAUSAL = masking_utils.causal_mask_function
BOTH_WAYS = masking_utils.bidirectional_mask_function
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 0, 1]])
LENGTHS = torch.tensor([7, 3, 5])[:, None]
PADDINGS = {
    "none": None,
    "all real": torch.ones(B, T, dtype=torch.bool),
    "right": torch.arange(T) < LENGTHS,
    "left": torch.arange(T) >= T - LENGTHS,
    "holes": torch.tensor([[1, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0], [1] * 7]).bool(),
}


def _packed(function: Callable[..., Any], ids_last: bool = False) -> Callable[..., Any]:
    """Packed texts kept apart; versions of transformers order the parts differently."""
    ids = masking_utils.packed_sequence_mask_function(
        masking_utils.find_packed_sequence_indices(POSITIONS)
    )
    inside = masking_utils.remap_positions_for_packed_sequence(function, POSITIONS)
    return masking_utils.and_masks(*((inside, ids) if ids_last else (ids, inside)))


FUNCTIONS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "causal": (CAUSAL, None),
    "bidirectional": (BOTH_WAYS, None),
    "sliding": (masking_utils.sliding_window_causal_mask_function(3), 3),
    "sliding, wide": (masking_utils.sliding_window_causal_mask_function(T), T),
    "sliding, both ways": (masking_utils.sliding_window_bidirectional_mask_function(2), 2),
    "chunked": (
        masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 2, 1])), 3
    ),
    "packed": (_packed(CAUSAL), None),
    "packed, ids last": (_packed(CAUSAL, ids_last=True), None),
    "packed, sliding": (
        _packed(masking_utils.sliding_window_causal_mask_function(2)), 2
    ),
    "packed, sliding, ids last": (
        _packed(masking_utils.sliding_window_causal_mask_function(2), ids_last=True), 2,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_masks, "FEW_ENTRIES", 0)


def _both(name: str, real: Tensor | None, **where: Any) -> tuple[Tensor | None, Tensor]:
    """Our mask, and the tensor of transformers that skips nothing."""
    function, window = FUNCTIONS[name]
    arguments: dict[str, Any] = {
        "batch_size": B, "q_length": T, "kv_length": T, "q_offset": 0, "kv_offset": 0,
        "mask_function": function, "attention_mask": real, "local_size": window,
    }  # fmt: skip
    arguments |= {"allow_is_causal_skip": "bidirectional" not in name and "packed" not in name}
    arguments |= {"allow_is_bidirectional_skip": name in ("bidirectional", "sliding, both ways")}
    arguments |= where
    plain = sdpa_mask(
        **arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    )
    assert plain is not None
    return attention_mask(**arguments), plain


def _entries(mask: Tensor | None, name: str) -> Tensor:
    """What a mask says, None as `sdpa` reads it: the causal flag, or no mask at all."""
    if mask is None:
        every = torch.ones(1, 1, T, T, dtype=torch.bool)
        return every if name in ("bidirectional", "sliding, both ways") else every.tril()
    return mask.entries() if isinstance(mask, RuleMask) else mask


@pytest.mark.parametrize("padded", PADDINGS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rule_says_what_the_tensor_says(name: str, padded: str) -> None:
    mask, plain = _both(name, PADDINGS[padded])
    assert mask is None or isinstance(mask, RuleMask)
    assert torch.equal(_entries(mask, name).expand(B, 1, T, T), plain)


@pytest.mark.parametrize("all_real", [None, torch.ones(B, T, dtype=torch.bool)])
@pytest.mark.parametrize("name", ["causal", "bidirectional"])
def test_there_is_no_mask_where_sdpa_has_none(name: str, all_real: Tensor | None) -> None:
    arguments = {"batch_size": B, "q_length": T, "kv_length": T, "attention_mask": all_real}
    arguments |= {"mask_function": FUNCTIONS[name][0], "allow_is_causal_skip": name == "causal"}
    arguments |= {"allow_is_bidirectional_skip": name == "bidirectional"}
    assert sdpa_mask(**arguments) is None
    assert attention_mask(**arguments) is None


@pytest.mark.parametrize("padded", ["none", "left"])
@pytest.mark.parametrize("name", ["causal", "sliding", "chunked"])
@pytest.mark.parametrize(
    ("T", "S", "first_query", "first_key"),
    [(4, 7, 3, 0), (4, 7, 0, 0), (2, 7, 3, 0), (3, 5, 5, 3), (3, 6, 5, 3)],
    ids=["cached", "static", "static, filled", "evicted", "evicted, static"],
)
def test_rules_know_where_queries_and_keys_begin(
    name: str, T: int, S: int, first_query: int, first_key: int, padded: str
) -> None:
    where = {"q_length": T, "kv_length": S, "q_offset": first_query, "kv_offset": first_key}
    real = None if padded == "none" else torch.arange(first_query + T) >= LENGTHS - 3
    mask, plain = _both(name, real, **where, allow_is_causal_skip=False)
    assert isinstance(mask, RuleMask)
    assert mask.n_keys <= S
    assert torch.equal(mask.entries(), plain)


def test_rules_hold_no_tensor_of_queries_by_keys() -> None:
    known = (("causal", "right"), ("sliding", "left"), ("bidirectional", "right"))
    for name, padded in known:
        mask, _ = _both(name, PADDINGS[padded])
        assert isinstance(mask, RuleMask)
        assert MaskParts.of(mask.rule, T, T).rest is None


def test_what_is_no_known_rule_is_the_tensor_of_transformers() -> None:
    blocks = masking_utils.blockwise_overlay(torch.tensor([[0, 0, 1, 1, -1, -1, 2]] * B))

    def own(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q + k) % 2 == 0

    def renamed(width: int) -> Callable[..., Any]:
        return lambda b, h, q, k: k > q - width

    of_another_version = renamed(3)
    of_another_version.__module__ = masking_utils.__name__
    of_another_version.__qualname__ = "sliding_window_overlay.<locals>.inner_mask"
    # Chunks of packed texts begin with each text.
    chunked = masking_utils.chunked_causal_mask_function(3, torch.zeros(B, dtype=torch.int64))
    for function in (
        masking_utils.or_masks(CAUSAL, blocks), own, of_another_version, _packed(chunked),
        masking_utils.remap_positions_for_packed_sequence(CAUSAL, POSITIONS),
    ):  # fmt: skip
        mask, plain = _both("causal", None, mask_function=function, allow_is_causal_skip=False)
        assert type(mask) is Tensor
        assert torch.equal(mask, plain.new_tensor(True) & sdpa_mask(
            B, T, T, mask_function=function, allow_is_causal_skip=False
        ))  # fmt: skip


def test_small_masks_and_those_of_one_query_are_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = _both("causal", PADDINGS["left"], q_length=1, q_offset=T - 1)
    assert type(one) is Tensor
    monkeypatch.setattr(_masks, "FEW_ENTRIES", 1 << 16)
    few, _ = _both("causal", PADDINGS["left"])
    assert type(few) is Tensor


def _mask() -> tuple[RuleMask, Tensor]:
    mask = RuleMask.of(causal() & padding([7, 3, 5]), (B, 1, T, T), T)
    plain = (causal() & padding([7, 3, 5])).dense(T, T)
    return mask, plain


def test_a_rule_is_described_without_its_entries() -> None:
    mask, _ = _mask()
    assert (mask.shape, mask.ndim, mask.dtype) == ((B, 1, T, T), 4, torch.bool)
    assert (mask.size(-1), mask.dim(), len(mask), mask.device.type) == (T, 4, B, "cpu")
    assert MaskParts.of(mask.rule, T, T).rest is None


@pytest.mark.parametrize(
    "read",
    [
        lambda mask: mask[:, :, 2:],
        lambda mask: mask & torch.ones(T, T, dtype=torch.bool),
        lambda mask: torch.where(mask, 0.0, -torch.inf),
        lambda mask: mask.to(torch.float32),
        lambda mask: mask.expand(B, 4, T, T),
        lambda mask: torch.cat([mask, mask]),
        lambda mask: ~mask,
    ],
)
def test_whatever_reads_a_rule_gets_a_tensor(read: Callable[[Tensor], Tensor]) -> None:
    mask, plain = _mask()
    result = read(mask)
    assert type(result) is Tensor
    assert torch.equal(result, read(plain))


@pytest.mark.parametrize("few", [0, 1 << 16])
@pytest.mark.parametrize("name", ["causal", "sliding", "bidirectional"])
@pytest.mark.parametrize("padded", ["none", "left"])
def test_models_written_for_eager_get_its_masks(
    name: str, padded: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_masks, "FEW_ENTRIES", few)
    arguments: dict[str, Any] = {
        "batch_size": B, "q_length": T, "kv_length": T, "attention_mask": PADDINGS[padded],
        "mask_function": FUNCTIONS[name][0], "config": transformers.GptOssModel.config_class(),
        "dtype": torch.bfloat16, "allow_is_bidirectional_skip": name == "bidirectional",
    }  # fmt: skip
    ours, theirs = attention_mask(**arguments), eager_mask(**arguments)
    if theirs is None:
        assert ours is None
        return
    assert isinstance(ours, RuleMask)  # which the kernel reads, and not its floats
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours.visible(), theirs == 0)
    assert torch.equal(ours + 0, theirs)


def test_a_rule_follows_changes_of_its_entries() -> None:
    mask, plain = _mask()
    mask[:, :, :, 0] = False
    plain[:, :, :, 0] = False
    assert torch.equal(mask.latest(), plain)

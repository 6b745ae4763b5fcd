"""What cannot be watched is refused by name, and nothing stays on the model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
import zoo
from torch import nn

from folders import tiny_llama
from headwise.errors import ArgumentError, HeadError, HeadwiseError, UnsupportedError
from headwise.layer import MultiHeadAttention
from headwise.tables import Head, resolve_heads
from headwise.watch import Request, Watch, observe
from oracles import modules_of, padded


def _watched(request: Request | None = None, passes: int = 1, **options: Any) -> Watch:
    """A watch of a layer of two heads on a text of three vectors."""
    layer = MultiHeadAttention(4, 2)
    with observe(layer, request or Request(), **options) as watch:
        for _ in range(passes):
            layer(torch.zeros(1, 3, 4))
    return watch


def _paired(*texts: list[tuple[int, int]], rows: int = 1, passes: int = 1, **given: Any) -> None:
    layer = MultiHeadAttention(4, 2)
    with observe(layer, Request(statistics=(), pairs=("subject",))) as watch:
        watch.pairs(**{"subject": texts} | given)
        for _ in range(passes):
            layer(torch.zeros(rows, 3, 4))


def _of_layers(layers: list[int]) -> None:
    model = zoo.make("Bert")
    with observe(model, layers=layers) as watch:
        model(**padded([[1, 2, 3]], "right"))
    left_out = {site.reason for site in watch.sites() if site.layer not in layers}
    assert left_out == {"left out by layers="}
    watch.table()


def _with_a_failing_relation() -> None:
    model = zoo.make("Bert")
    with observe(model, Request(relations={"ratio": lambda ids: [(1, ids[0] // ids[1] % 2)]})):
        model(**padded([[1, 2, 3], [4, 0]], "right"))


REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"statistics": ("entropie",)}, "'entropie'.*Choose from entropy"),
    ({"classes": {"self": {1}}}, "'self' is requested twice"),
    ({"classes": {"dots": {1}}, "pairs": ("dots",)}, "'dots' is requested twice"),
    ({"top": ("entropy",)}, "top of 'entropy'.*Choose from first"),
    ({"value": ("first", "first")}, "value of 'first' is requested twice"),
    ({"statistics": "first"}, "statistics='first'"),
    ({"pairs": "dep"}, "pairs='dep'"),
    ({"top": (1,)}, r"top=\(1,\)"),
    ({"classes": {"a": 3}}, "class 'a' is 3"),
    ({"relations": {"a": 5}}, "relation 'a' is 5"),
    ({"per_query": True}, "per_query=True without spans"),
    *(({"spans": (x,)}, f"'{x}' is reserved") for x in ("queries", "entropy", "layer", "name")),
]
DOORS: list[tuple[dict[str, Any], str]] = [
    ({"layers": []}, r"layers=\[\]"),
    ({"layers": 1}, "layers=1"),
    ({"layers": [-1]}, r"layers=\[-1\]"),
    ({"every": 1.5}, r"every=1\.5"),
    ({"every": 0}, "every=0"),
    ({"every": True}, "every=True"),
    ({"request": ["entropy"]}, r"request=\['entropy'\]"),
]
# What is asked of a watch that kept maps, or did not.
LOOKS: list[tuple[bool, Callable[[Watch], Any], type[HeadwiseError], str]] = [
    (False, lambda watch: watch.weights("L0.H0"), ArgumentError, "weights: maps=False"),
    (False, lambda watch: watch.received("L0.H0"), ArgumentError, "received=False"),
    (False, lambda watch: watch.layers(), ArgumentError, r"Watch\.layers: maps=False"),
    (False, lambda watch: watch.top_keys("L0.H0"), ArgumentError, "top_keys: maps=False"),
    (
        True,
        lambda watch: watch.weights("L0.H0", range(4)),
        ArgumentError,
        "Watch.weights: queries has 3, where",
    ),
    (True, lambda watch: watch.weights("L0.H0", [0, -4]), ArgumentError, "queries has -4, where"),
    (True, lambda watch: watch.weights("L1.H0"), HeadError, r"no head L1.H0.*L0.H0 to L0.H1"),
    (True, lambda watch: watch.weights("L2"), HeadError, "'L2' is neither a head nor a layer"),
    (True, lambda watch: watch.weights([(0, 0), (0, 1)]), ArgumentError, "are several heads"),
    (True, lambda watch: watch.top_keys("L0.H0", k=0), ArgumentError, "k=0 among 3 keys"),
    (True, lambda watch: watch.top_keys("L0.H0", k=4), ArgumentError, "k=4 among 3 keys"),
    (
        True,
        lambda watch: watch.top_keys("L0.H0", k=1, rows=range(5)),
        ArgumentError,
        r"top_keys: queries has 3, where .* 3 queries",
    ),
]
TWICE = [Head("encoder", 0, 1), Head("decoder", 0, 1)]


@pytest.mark.parametrize(("call", "kind", "message"), [
    *((partial(Request, **given), ArgumentError, message) for given, message in REQUESTS),
    *((partial(_watched, **given), ArgumentError, message) for given, message in DOORS),
    *((lambda maps=maps, look=look: look(_watched(Request(maps=maps))), *said)
      for maps, look, *said in LOOKS),
    (lambda: _watched(passes=0).table(), UnsupportedError, "in 0 forward passes"),
    *((partial(_of_layers, layers), ArgumentError, r"layers \[7\].*There are 0 to 1")
      for layers in ([1, 7], [7])),
    *((partial(_watched, request), UnsupportedError, r"all.*input_ids")
      for request in (Request(relations={"all": list}), Request(classes={"all": {1}}))),
    (_with_a_failing_relation, ArgumentError, r"'ratio' fails \(ZeroDivisionError: .*\) "
     "for text 1 of the pass, of 2 tokens: 4, 0. Correct it"),
    (lambda: resolve_heads((0, 1), TWICE), HeadError, "could be decoder.L0.H1, encoder.L0.H1"),
    (lambda: _paired([(1, 0)], rows=2), ArgumentError,
     r"'subject' has pairs of 1 text where.*model reads 2"),
    (lambda: _paired([(3, 0)]), ArgumentError,
     r"pairs\(subject=...\) gave \(3, 0\).*3 tokens.*0 to 2"),
    (lambda: _paired([(1, 0)], object=[[(1, 0)]]), ArgumentError,
     r"object, subject given.*pairs=\('subject',\)"),
    (lambda: _paired([(1, 0)], passes=2), ArgumentError,
     "no pairs were given for forward pass 2"),
])  # fmt: skip
def test_what_cannot_be_asked(
    call: Callable[[], object], kind: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's kernel
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap], ids=["grad", "vmap"])
def test_transforms_are_refused(transform: Callable[..., Any]) -> None:
    layer = MultiHeadAttention(4, 2)
    before = modules_of(layer)
    with (
        pytest.raises(UnsupportedError, match=r"inside a transform of torch\.func"),
        observe(layer),
    ):
        transform(lambda x: layer(x.view(1, -1, 4)).sum())(torch.randn(2, 1, 3, 4)[0])
    assert modules_of(layer) == before


def test_a_call_that_was_misread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **_: Any) -> Any:
        return (q @ k.transpose(-1, -2)).softmax(-1).matmul(2 * v).transpose(1, 2), None

    model = zoo.make("Bert")
    before = modules_of(model)
    transformers.AttentionInterface.register("doubled", doubled)
    transformers.AttentionMaskInterface.register("doubled", transformers.masking_utils.sdpa_mask)
    model.set_attn_implementation("doubled")
    with (
        pytest.raises(UnsupportedError, match=r"layer.0.attention.self \(doubled\)"),
        observe(model),
    ):
        model(**padded([[1, 2, 3]], "right"))
    assert modules_of(model) == before
    del transformers.AttentionInterface._global_mapping["doubled"]
    del transformers.AttentionMaskInterface._global_mapping["doubled"]


def test_numbers_that_the_model_spoils_are_not_laid_to_our_reading() -> None:
    """Transformers' eager attention makes NaN of padding on the left in float64, and spreads it."""
    model = tiny_llama(attn_implementation="eager").model.double()
    texts = padded([[1, 2, 3], [4]], "left")
    assert model(**texts).last_hidden_state.isnan().any()
    with (
        pytest.raises(
            UnsupportedError, match=r"layers.1.self_attn \(eager\) returns NaN for queries"
        ),
        observe(model),
    ):
        model(**texts)


def test_a_mask_of_another_kind_is_refused() -> None:
    """Flash kernels take a row of padding for each text, which says not who sees whom."""

    def in_rows(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **_: Any) -> Any:
        assert mask.shape == (2, 3)
        return q.transpose(1, 2), None

    model = zoo.make("Bert")
    masks = transformers.AttentionMaskInterface
    transformers.AttentionInterface.register("in_rows", in_rows)
    masks.register("in_rows", transformers.masking_utils.flash_attention_mask)
    model.set_attn_implementation("in_rows")
    refused = pytest.raises(UnsupportedError, match=r"'in_rows'.*\(2, 3\).*implementation='sdpa'")
    with refused, observe(model):
        model(**padded([[1, 2, 3], [4, 5]], "right"))
    del transformers.AttentionInterface._global_mapping["in_rows"]
    del masks._global_mapping["in_rows"]


@pytest.mark.parametrize(
    "request_", [Request(statistics=("output_norm",)), Request(value=("self",))]
)
def test_what_a_head_writes_needs_its_projection(request_: Request) -> None:
    class Bare(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    for model, name in ((nn.Sequential(Bare()), "0"), (Bare(), "the model")):
        message = f"need the output projection of {name}, which was not found"
        with pytest.raises(UnsupportedError, match=message), observe(model, request_):
            model(torch.zeros(1, 2, 3, 4))


def test_queries_that_cannot_be_placed_are_refused() -> None:
    """The last of four queries sees the first two keys alone: none would stand at -2."""

    class Backwards(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.view(1, 1, 4, 3)
            k = torch.cat([q, q], 2)
            mask = torch.zeros(4, 8, dtype=torch.bool)
            mask[:, :2] = True
            return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    with (
        pytest.raises(UnsupportedError, match=r"Backwards.* 4 queries to 8 keys.* first 2:"),
        observe(Backwards()) as watch,
    ):
        watch._model(torch.randn(1, 4, 3))


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_model_on_the_meta_device_is_refused(by_hand: bool) -> None:
    class OnMeta(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if by_hand:
                return (x @ x.mT).masked_fill(x[..., :1] > 0, -1e9).softmax(-1) @ x
            return nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.zeros(1, 2, 3, 4, device="meta")
    refused = pytest.raises(UnsupportedError, match="OnMeta is called on the meta device")
    with refused, observe(OnMeta()) as watch:
        watch._model(x)
    ids = torch.zeros(1, 3, dtype=torch.long, device="meta")
    refused = pytest.raises(UnsupportedError, match="BertModel is called on the meta device")
    with refused, observe(zoo.make("Bert").to("meta")) as watch:
        watch._model(ids)


def test_all_heads_of_a_layer_have_their_weights_together() -> None:
    with torch.no_grad(), observe(zoo.make("Bert"), Request(maps=True)) as watch:
        watch._model(**padded([[1, 2, 3]], "right"))
    layer = watch.weights("L1", rows=slice(1, 3))
    assert layer.shape == (1, 4, 2, 3)
    for head in range(4):
        assert torch.equal(layer[:, head], watch.weights((1, head), rows=slice(1, 3)))

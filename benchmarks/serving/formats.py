"""Saves models as GGUF and ONNX, and runs them in their engines.

    OMP_NUM_THREADS=1 python -m benchmarks.serving.formats PYTHON \\
        --into benchmarks/results/formats.md

PYTHON is an interpreter of an environment with xllamacpp, which brings llama.cpp built. Measures
how far logits and tokens agree, and what an encoder gains as ONNX and a decoder as GGUF.
"""

import json
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import headwise as hw
from benchmarks._report import cpu_name, parser_of, show, software, table, titled
from benchmarks._timing import interleaved

SIZES = {
    "vocab_size": 700, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512,
}  # fmt: skip
# How the tokenizers of Qwen 2 and Llama 3 split a text, as their files have it.
PATTERNS = {
    name: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers +
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for name, numbers in (("qwen2", r"\p{N}"), ("llama-bpe", r"\p{N}{1,3}"))
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
# The class, the way its tokenizer splits texts, whether layers differ, and its configuration.
MODELS: list[tuple[str, str, bool, dict[str, Any]]] = [
    ("Llama", "gpt-2", True, {}),
    ("Llama", "llama-bpe", True, {"rope_parameters": LLAMA3}),
    ("Llama", "llama-bpe", True, {"attention_bias": True, "mlp_bias": True}),
    ("Llama", "sentencepiece", False, {"rope_parameters": LINEAR}),
    ("Llama", "smollm", False, {"tie_word_embeddings": True}),
    ("Mistral", "sentencepiece", True, {"sliding_window": None}),
    ("Qwen2", "qwen2", True, {}),
    ("Qwen2", "qwen2", False, {}),
    ("Qwen2", "qwen2", False, {"rope_parameters": LINEAR}),
    ("Qwen3", "smollm", False, {}),
    ("Qwen3", "gpt-2", True, {"tie_word_embeddings": True}),
    ("Llama", "gpt-2", False, {"dtype": "bfloat16"}),
    ("Llama", "gpt-2", True, {"dtype": "bfloat16"}),
]
TEXTS = [
    "Hello  world\n\n  it's 12345 o'clock, naïve café — “ok” \t x",
    "日本語 and 😀 emoji",
    "a",
    "",
    "  leading",
    "MIXED Case's 3.14159 [x]{y}\r\n z",
    "The animal didn't cross the street because it was too tired.",
]
N_TEXTS, N_TOKENS = 5, 200
ROUNDS = 7


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("python")
    options = parser.parse_args()
    torch.set_num_threads(1)
    where = f"{software()}, 1 thread, {cpu_name()}; xllamacpp {_version(options.python)}"
    compared = [_compared(options.python, *case) for case in MODELS]
    titles = ("model", "tokenizer", "heads of the layers", "largest difference", "of torch")
    parts = (
        (
            f"Logarithms of the probabilities of all 700 tokens at {N_TEXTS * N_TOKENS:,} "
            f"positions, and the tokens of {len(TEXTS)} texts",
            table((*titles, "top-1 equal", "texts with other tokens"), compared, 3),
        ),
        (
            f"Without 14 of 48 heads, over all of them: medians of {ROUNDS} rounds",
            table(("model, engine", "size", "time"), _gains(options.python)),
        ),
    )
    show(f"{where}.\n\n{titled(parts)}", options.into)


def _compared(
    python: str, name: str, split: str, uneven: bool, changes: dict[str, Any]
) -> list[str]:
    tokenizer = _tokenizer(split)
    halved = changes.get("dtype") == "bfloat16"
    model = _model(name, SIZES | {k: v for k, v in changes.items() if k != "dtype"})
    if uneven:
        model = hw.prune(model, ["L1.H2", "L1.H3"])
    model = model.bfloat16() if halved else model
    with tempfile.TemporaryDirectory() as folder:
        saved = hw.save(model, Path(folder, "small"), format="gguf", tokenizer=tokenizer)
        gap, own, same, wrong = _in_llama_cpp(python, saved / "model.gguf", model, tokenizer)
    heads = ", ".join(str(x.self_attn.q_proj.out_features // 16) for x in model.model.layers)
    about = ", ".join("bfloat16" if name == "dtype" else name for name in changes) or "plain"
    return [f"{name} ({about})", split, heads, f"{gap:.1e}", own, f"{same:.1%}", str(wrong)]


def _model(name: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, f"{name}ForCausalLM")
    known = sizes if name != "Qwen2" else {k: v for k, v in sizes.items() if k != "head_dim"}
    model = cls(cls.config_class(**known)).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
            elif "q_proj" in key or "k_proj" in key:
                weight.mul_(8)
            elif "lm_head" in key or "embed" in key:
                weight.mul_(10)
    return model


def _tokenizer(split: str) -> Any:
    """A tokenizer of 700 tokens, trained on the project's own pages."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, trainers
    from tokenizers import pre_tokenizers as pre
    from transformers import PreTrainedTokenizerFast

    pages = [path.read_text("utf-8") for path in sorted(Path("docs").rglob("*.md"))]
    special = ["<unk>", "<s>", "</s>"]
    tokenizer: Any
    if split == "sentencepiece":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokens = special + [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer.train_from_iterator(
            pages, trainers.BpeTrainer(vocab_size=700, special_tokens=tokens, show_progress=False)
        )
        state = json.loads(tokenizer.to_str())
        state["added_tokens"] = state["added_tokens"][:3]
        tokenizer = Tokenizer.from_str(json.dumps(state))
    else:
        tokenizer = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
        pattern = PATTERNS.get(split)
        steps: list[Any] = [] if pattern is None else [pre.Split(Regex(pattern), "isolated")]
        if split == "smollm":
            steps.append(pre.Digits(individual_digits=True))
        steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
        tokenizer.pre_tokenizer = pre.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator(
            pages,
            trainers.BpeTrainer(
                vocab_size=700,
                special_tokens=special,
                initial_alphabet=pre.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


# Runs in the environment of PYTHON until its input ends.
_SERVER = """
import sys, xllamacpp as x
p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.warmup, p.verbosity = sys.argv[1], 1024, 1, False, 0
p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
s = x.Server(p)
print("AT", s.listening_address, flush=True)
sys.stdin.read()
"""


class _Llama:
    """A llama.cpp server of one model."""

    def __init__(self, python: str, path: Path) -> None:
        command = [python, "-c", _SERVER, str(path)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        address = next(line for line in self.process.stdout if line.startswith("AT ")).split()[1]
        self.address = address if address.startswith("http") else f"http://{address}"

    def ask(self, path: str, **question: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        body = json.dumps(question).encode()
        with urllib.request.urlopen(
            urllib.request.Request(self.address + path, body, headers)
        ) as answer:
            return json.load(answer)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def _in_llama_cpp(
    python: str, path: Path, model: Any, tokenizer: Any
) -> tuple[float, str, float, int]:
    """The largest difference, torch's own, the share of equal top tokens, texts cut otherwise."""
    server = _Llama(python, path)
    tokens = [server.ask("/tokenize", content=text, add_special=True)["tokens"] for text in TEXTS]
    wrong = sum(x != tokenizer(text)["input_ids"] for x, text in zip(tokens, TEXTS, strict=True))
    ids = torch.randint(3, 700, (N_TEXTS, N_TOKENS), generator=torch.manual_seed(1))
    with torch.no_grad():
        own = model(ids).logits.double().log_softmax(-1)
        expected = model.float()(ids).logits.double().log_softmax(-1)
    gaps, same = [], []
    for text in range(N_TEXTS):
        for position in range(N_TOKENS):
            answer = server.ask(
                "/completion", prompt=ids[text, : position + 1].tolist(), n_predict=1,
                n_probs=700, temperature=1.0, cache_prompt=False,
            )  # fmt: skip
            if "completion_probabilities" not in answer:
                continue  # the one sampled token is half a character, for which it gives none
            top = answer["completion_probabilities"][0]["top_logprobs"]
            logs = torch.full((700,), float("nan"), dtype=torch.double)
            for entry in top:
                logs[entry["id"]] = entry["logprob"]
            gaps.append((logs - expected[text, position]).abs().nan_to_num().max().item())
            same.append(top[0]["id"] == expected[text, position].argmax().item())
    server.close()
    by_torch = (own - expected).abs().max().item()
    return max(gaps), f"{by_torch:.1e}" if by_torch else "", sum(same) / len(same), wrong


def _gains(python: str) -> list[tuple[str, ...]]:
    """Size and time of an encoder and a decoder without 14 of 48 heads, over the full ones."""
    import numpy as np
    from onnxruntime import InferenceSession, SessionOptions

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 700, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4,
        "num_attention_heads": 12,
    }  # fmt: skip
    gone = [f"L{number % 4}.H{number // 4}" for number in range(14)]
    encoder = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    decoder = _model("Llama", {**sizes, "head_dim": 64, "max_position_embeddings": 1024})
    rows: list[tuple[str, ...]] = []
    ids = torch.randint(3, 700, (1, 512)).numpy()
    options = SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        files, runs = [], []
        for part, kept in (("full", encoder), ("small", hw.prune(encoder, gone))):
            saved = hw.save(kept, Path(folder, f"encoder-{part}"), format="onnx")
            files.append(saved / "onnx" / "model.onnx")
            session = InferenceSession(files[-1], options)
            batch = {
                x.name: np.ones_like(ids) if "mask" in x.name else ids * (x.name == "input_ids")
                for x in session.get_inputs()
            }
            runs.append(partial(session.run, None, batch))
        rows.append(("BERT, onnxruntime, 512 tokens", *_ratios(files, runs)))
        servers, files = [], []
        for part, kept in (("full", decoder), ("small", hw.prune(decoder, gone))):
            saved = hw.save(kept, Path(folder, part), format="gguf", tokenizer=_tokenizer("gpt-2"))
            files.append(saved / "model.gguf")
            servers.append(_Llama(python, files[-1]))
        prompt = ids[0].tolist()
        for task, question in (
            ("prompt of 512 tokens", {"prompt": prompt, "n_predict": 1, "cache_prompt": False}),
            ("64 new tokens", {"prompt": prompt[:8], "n_predict": 64, "ignore_eos": True}),
        ):
            runs = [partial(server.ask, "/completion", **question) for server in servers]
            rows.append((f"Llama, llama.cpp, {task}", *_ratios(files, runs)))
        for server in servers:
            server.close()
    return rows


def _ratios(files: Sequence[Path], works: Sequence[Callable[[], Any]]) -> tuple[str, str]:
    """The size and the time of the second file over those of the first."""
    full, small = (
        sum(x.stat().st_size for x in file.parent.iterdir() if x.is_file()) for file in files
    )
    times = interleaved(dict(zip(("full", "small"), works, strict=True)), ROUNDS)
    return f"{small / full:.2f}", str(times.ratio("small", "full"))


def _version(python: str) -> str:
    code = "from importlib.metadata import version; print(version('xllamacpp'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()

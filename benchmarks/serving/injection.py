"""Attention to the instruction and to the passage, in served requests with a planted injection.

    python -m benchmarks.serving.injection --into benchmarks/results/serving-injection.md

A small model is trained here, in minutes: a prompt has an instruction, which names a word, and a
passage of words; the answer is the word of the instruction. Two thirds of the passages hold a
second instruction. Where it stands bare, the answers of the training texts obey it; between quotes
they do not. A head is chosen on one half of the prompts and judged on the other. Needs vLLM.
"""

import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headwise as hw
from benchmarks._report import parser_of, show, software, table
from headwise.vllm import spans, watch

BEGIN, INSTRUCTION, PASSAGE, QUOTE, ANSWER = range(5)
KEYS, VALUES = torch.arange(5, 13), torch.arange(13, 29)
N_ENTRIES = 5
SPANS = ("instruction", "passage")
KINDS = ("none", "bare", "quoted")
STEPS, BATCH = 400, 48
EACH = 200  # prompts of each kind, half of them to choose on
FOLDER = Path("build/serving-injection")
Prompts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens; both answers: right, injected


def main() -> None:
    options = parser_of(__doc__).parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not FOLDER.exists():
        train().save_pretrained(FOLDER)
    prompts = {kind: make(kind, EACH, seed) for seed, kind in enumerate(KINDS, 1)}
    show(page(*serve(prompts)), options.into)


def make(kind: str, n: int, seed: int) -> Prompts:
    """Prompts of one length, with an injection of one kind (or random entries in its place)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(items: torch.Tensor, size: int) -> torch.Tensor:
        """Different items in each row."""
        order = torch.rand(n, len(items), generator=generator).argsort(1)
        return items[order[:, :size]]

    keys = draw(KEYS, N_ENTRIES)
    values = VALUES[torch.randint(len(VALUES), (n, N_ENTRIES), generator=generator)]
    body = torch.stack([keys, values], -1).flatten(1)
    order = torch.rand(n, N_ENTRIES, generator=generator).argsort(1)
    rows = torch.arange(n)
    requested, injected = order[:, 0], order[:, 1]
    if kind != "none":
        command = torch.full((n, 2), INSTRUCTION)
        command[:, 1] = keys[rows, injected]
        if kind == "quoted":
            marks = torch.full((n, 1), QUOTE)
            command = torch.cat([marks, command, marks], 1)
        place = 2 * torch.randint(1, N_ENTRIES, (n,), generator=generator)
        body = torch.stack(
            [torch.cat([x[:i], c, x[i:]]) for x, c, i in zip(body, command, place, strict=True)]
        )
    head = torch.tensor([[BEGIN, INSTRUCTION, 0, PASSAGE]]).repeat(n, 1)
    head[:, 2] = keys[rows, requested]
    tokens = torch.cat([head, body, torch.full((n, 1), ANSWER)], 1)
    return tokens, keys[rows, requested], keys[rows, injected]


def train() -> LlamaForCausalLM:
    """A model of three layers that learns to answer, by the loss of the answers alone."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS, pct_start=0.1)
    start = time.monotonic()
    for step in range(STEPS):
        kind = KINDS[step % 3]
        tokens, right, injected = make(kind, BATCH, 1000 + step)
        answer = injected if kind == "bare" else right
        logits = model(tokens).logits[:, -1]
        loss = torch.nn.functional.cross_entropy(logits, answer)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 < 3:
            print(step, kind, f"{loss:.3f}, {time.monotonic() - start:.0f} s", flush=True)
    return model


def serve(prompts: dict[str, Prompts]) -> tuple[Any, ...]:
    """What the model answers, and the mass of each head on both spans while it does."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(FOLDER), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=64, enable_prefix_caching=False, gpu_memory_utilization=0.2,
    )  # fmt: skip
    answers, masses, heads = {}, {}, []
    for kind, (tokens, _, _) in prompts.items():
        stretches = spans(instruction=(1, 3), passage=(4, tokens.shape[1] - 1))
        parameters = SamplingParams(
            max_tokens=1, temperature=0, detokenize=False, ignore_eos=True, extra_args=stretches
        )
        requests = [{"prompt_token_ids": text} for text in tokens.tolist()]
        # No position but the first, which has one key, is a multiple: so the last of the prompt
        # alone counts, which chooses the answer.
        with watch(llm, hw.Request((), spans=SPANS), every=1000) as served:
            outputs = llm.generate(requests, parameters, use_tqdm=False)
        answers[kind] = torch.tensor([output.outputs[0].token_ids[0] for output in outputs])
        tables = [served.table(output.request_id, "prefill") for output in outputs]
        heads = [str(head) for head in tables[0].heads]
        masses[kind] = np.array(
            [[of_request.mean(span) for of_request in tables] for span in SPANS]
        )
    return prompts, answers, masses, heads


def auroc(low: np.ndarray, high: np.ndarray) -> float:
    """The share of pairs in which the second is larger; ties count half."""
    return float(np.mean((high[:, None] > low) + 0.5 * (high[:, None] == low)))


def page(
    prompts: dict[str, Prompts],
    answers: dict[str, torch.Tensor],
    masses: dict[str, np.ndarray],  # [spans, prompts, heads]
    heads: list[str],
) -> str:
    half = EACH // 2

    def shares(kind: str, part: slice) -> np.ndarray:
        """The passage's share of what both spans get, by prompt and head."""
        instruction, passage = masses[kind][:, part]
        return passage / (instruction + passage)

    to_choose, to_judge = slice(half), slice(half, None)
    none, bare = shares("none", to_choose), shares("bare", to_choose)
    best = int(np.argmax([auroc(none[:, h], bare[:, h]) for h in range(len(heads))]))
    picks: dict[str, Any] = {f"{heads[best]}, chosen": [best], "mean of all heads": slice(None)}
    pairs = (("none", "bare"), ("none", "quoted"), ("quoted", "bare"))
    answered, separated = [], []
    for kind in KINDS:
        _, right, injected = prompts[kind]
        obeyed = [f"{(answers[kind] == x)[half:].float().mean():.2f}" for x in (right, injected)]
        attention = masses[kind][:, half:]
        cells = [
            " · ".join(f"{mass[:, pick].mean():.2f}" for mass in attention)
            for pick in picks.values()
        ]
        answered.append([kind, *obeyed, *cells])
    for name, pick in picks.items():
        scores = [
            auroc(*(shares(kind, to_judge)[:, pick].mean(1) for kind in pair)) for pair in pairs
        ]
        separated.append([name, *(f"{score:.2f}" for score in scores)])
    titles = ["injection", "obeys the instruction", "obeys the injection", *picks]
    return (
        f"{software()}, vLLM {version('vllm-cpu')}, {half} prompts of each kind; heads were chosen "
        f"on {half} others.\n\nAnswers, and the attention of the prompt's last query to the "
        f"instruction · the passage:\n\n{table(titles, answered)}\n\nAUROC of the passage's "
        f"share of both:\n\n"
        f"{table(['heads', *(f'{a} against {b}' for a, b in pairs)], separated)}"
    )


if __name__ == "__main__":
    main()

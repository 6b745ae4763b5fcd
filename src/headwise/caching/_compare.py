"""A plan at work: the loss, bytes and speed of its cache beside those of the full cache."""

import time
from statistics import median
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.caching._plan import CachePlan, full_plan, sized
from headwise.corpora import one_text
from headwise.errors import ArgumentError
from headwise.models import cache_argument, check_model, device_of
from headwise.models.texts import pieces_of, tokenizer_of, without_logits

_ALL = 1 << 30  # tokens: more than any prompt has
_PART = 512  # tokens of a prompt whose logits are in memory: 0.5 GB with a vocabulary of 262,144
_DECODED = 32  # tokens after the prompt, greedily
_ROUNDS = 3  # of both caches in turn, so that other work on the machine slows both


@torch.no_grad()
def compare_caches(
    model: nn.Module,
    plan: CachePlan,
    prompt: str,
    *,
    tokenizer: Any,
    max_tokens: int | None = None,
) -> pd.DataFrame:
    """Read a prompt and continue it under the full cache and under that of a plan.

    Both caches are those of this library and read by its kernels, so they differ in the plan alone.

    Args:
        max_tokens: The most tokens of the prompt, from its beginning. None is all.
    Returns:
        A row for each cache. `loss` is the mean cross-entropy, in nats, of the tokens in the second
        half of the prompt, each predicted from the true tokens before it (teacher forcing), as far
        as the cache still holds them. `bytes` is that of the keys and values that the
        cache holds after the prompt, without slots reserved ahead.
        `tokens_per_second` is the speed of decoding, one token at a time, without the time for the
        prompt: the median of three rounds.
    Raises:
        ArgumentError: the prompt and what is decoded do not fit the model, or the plan keeps all
            tokens of the prompt; or the plan is for another model.
        UnsupportedError: the model has no cache of keys and values alone.
    """
    wrapper, model = model, check_model("compare_caches", model)
    tokenizer = tokenizer_of(wrapper, tokenizer, "compare_caches")
    prompt = one_text("compare_caches", prompt, "prompt")
    pieces = pieces_of(tokenizer, prompt, max_tokens or _ALL, begin=True)
    ids = torch.tensor([next(iter(pieces), ())], dtype=torch.long, device=device_of(model))
    n_tokens, context = ids.shape[1], getattr(model.config, "max_position_embeddings", None)
    if context and n_tokens + _DECODED > context:
        raise ArgumentError(
            f"compare_caches: the prompt has {n_tokens} tokens, {_DECODED} are decoded, and the "
            f"model reads {context}. Give a shorter prompt, or max_tokens={context - _DECODED}."
        )
    if n_tokens < 2 or plan.share(n_tokens) == 1:
        raise ArgumentError(
            f"compare_caches: the plan keeps all {n_tokens} tokens of the prompt, so the caches "
            f"are the same. Give a longer prompt, or a plan with a smaller window."
        )
    full = full_plan(model)
    plans = {"full cache": full, "this plan": plan}
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    with in_evaluation(model):
        for _ in range(_ROUNDS):
            for name, used in plans.items():
                with used.cache(model) as cache:
                    rounds[name].append(_read_and_decode(model, cache, ids))
    return pd.DataFrame(
        {
            "name": name,
            "loss": rounds[name][0][0],
            "bytes": sized(used, full).nbytes(n_tokens),
            "tokens_per_second": _DECODED / median(seconds for _, seconds in rounds[name]),
        }
        for name, used in plans.items()
    )


def _read_and_decode(model: nn.Module, cache: Any, ids: Int[Tensor, "1 T"]) -> tuple[float, float]:
    """The loss of the second half of a prompt, and the seconds of decoding after it."""
    keep = {str(cache_argument(model)): cache, "use_cache": True}
    first, second = ids.tensor_split(2, dim=1)
    last = model(input_ids=first, **keep, **without_logits(model)).logits[:, -1:]
    losses = []
    for part in torch.split(second, _PART, dim=1):
        logits = model(input_ids=part, **keep).logits
        predicted = torch.cat([last, logits[:, :-1]], 1)
        losses.append(F.cross_entropy(predicted[0].float(), part[0], reduction="none"))
        last = logits[:, -1:]
    loss = torch.cat(losses).mean().item()
    token = last.argmax(-1)
    start = time.perf_counter()
    for _ in range(_DECODED):
        token = model(input_ids=token, **keep).logits[:, -1:].argmax(-1)
    token.cpu()  # waits for a GPU
    return loss, time.perf_counter() - start

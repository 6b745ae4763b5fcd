"""Arguments under other libraries' names: the error names ours, and its polarity."""

import inspect

import numpy as np
import pytest
import torch

import headwise as hw
from headwise import _argument_names
from headwise._argument_names import suggests
from headwise.errors import UnknownArgumentError
from headwise.tables import Head, Scores

Q = torch.zeros(1, 2, 5, 3)
MASK = torch.ones(5, 5, dtype=torch.bool)
PADDING = torch.zeros(1, 5, dtype=torch.bool)
X = torch.zeros(1, 5, 6)
LAYER = hw.MultiHeadAttention(6, 2)
SCORES = Scores((Head("", 0, 0), Head("", 0, 1)), np.array([0, 1]), np.array([[4.0, 3.0]]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: hw.attend(Q, Q, Q, is_causal=True),
            "attend: is_causal has another name here. Give causal=True",
        ),
        (
            lambda: hw.attend(Q, Q, Q, attn_mask=MASK),
            r"attend: attn_mask .*mask=, where True = may attend",
        ),
        (lambda: hw.attend(query=Q, key=Q, value=Q), "attend: query .*Give q=, the first"),
        (lambda: hw.attend(Q, K=Q, v=Q), "attend: K .*Give k=, the second"),
        (
            lambda: hw.attend(Q, Q, Q, MASK),
            "attend: 4 arguments have no name, where only q, k, v may.* as in mask=",
        ),
        (
            lambda: hw.reference.attention(Q.numpy(), Q.numpy(), Q.numpy(), MASK.numpy(), True),
            "attention: 5 arguments have no name, where only q, k, v may.* as in mask=",
        ),
        (
            lambda: LAYER(X, X, X, PADDING),
            "forward: 4 arguments have no name, where only query, key, value .*as in mask=",
        ),
        (lambda: LAYER(Q=X, K=X, V=X), "forward: Q .*Give query=, the first"),
        (lambda: LAYER(X, k=X), "forward: k .*Give key=, the second"),
        (
            lambda: hw.MultiHeadAttention(6, h=2),
            "MultiHeadAttention: h has another name here. Give n_heads=",
        ),
        (lambda: hw.reference.MultiHeadAttention(6, h=2), "h .*n_heads="),
        (lambda: hw.attend(Q, Q, Q, enable_gqa=True), "enable_gqa .*may have fewer heads"),
        (
            lambda: hw.attend(Q, Q, Q, casual=True),
            r"attend: there is no argument casual. Did you mean causal\?",
        ),
        (
            lambda: hw.attend(Q, Q, Q, zzz=1),
            "attend: there is no argument zzz. The arguments are q, k, v, mask",
        ),
        (
            lambda: hw.reference.attention(Q.numpy(), Q.numpy(), Q.numpy(), is_causal=True),
            "attention: is_causal .*causal=True",
        ),
        (lambda: LAYER(X, is_causal=True), "MultiHeadAttention.forward: is_causal .*causal=True"),
        (lambda: LAYER(X, attn_mask=MASK), r"attn_mask .*masks.from_blocked\(attn_mask\)"),
        (
            lambda: LAYER(X, key_padding_mask=PADDING),
            r"key_padding_mask .*from_blocked\(.*True = blocked; here True = may attend",
        ),
        (lambda: LAYER(X, attention_mask=PADDING), r"attention_mask .*from_binary.*1 = may attend"),
        (lambda: LAYER(X, average_attn_weights=False), "average_attn_weights .*need_weights=True"),
        (lambda: LAYER(X, dropout_p=0.1), "dropout_p .*dropout= when the layer is made"),
        (lambda: LAYER(X, memory=X), "memory .*key=, the second argument"),
        (
            lambda: hw.MultiHeadAttention(embed_dim=6, num_heads=2),
            "MultiHeadAttention: embed_dim .*Give d_model=",
        ),
        (lambda: hw.MultiHeadAttention(6, num_heads=2), "num_heads .*Give n_heads="),
        (
            lambda: hw.MultiHeadAttention(6, 2, batch_first=True),
            r"batch_first .*\[batch, tokens, width\]",
        ),
        (lambda: hw.MultiHeadAttention(6, 2, dropout_p=0.1), "dropout_p .*Give dropout="),
        (
            lambda: hw.MultiHeadAttention(6, 2, headdim=3),
            r"no argument headdim. Did you mean head_dim\?",
        ),
        (
            lambda: hw.reference.MultiHeadAttention(6, num_heads=2),
            "MultiHeadAttention: num_heads .*n_heads=",
        ),
        (lambda: hw.MultiHeadAttention(n_embd=6, n_head=2), "n_embd .*Give d_model="),
        (
            lambda: hw.MultiHeadAttention.from_state_dict({}, num_heads=2),
            "from_state_dict: num_heads .*Give n_heads=",
        ),
        (
            lambda: hw.reference.MultiHeadAttention(6, 2).forward(X.numpy(), is_causal=True),
            r"forward: is_causal .*mask=np.tri\(.*True = may attend",
        ),
        (
            lambda: hw.reference.MultiHeadAttention(6, 2)(X.numpy(), attn_mask=MASK.numpy()),
            "attn_mask .*True = blocked: give mask=~attn_mask",
        ),
        (
            lambda: hw.load("model", trust_remote_code=True),
            "trust_remote_code is not needed here. Give nothing: code beside",
        ),
        (lambda: hw.plan(SCORES, 0.3), "plan: only the scores have no name. Give remove=0.3"),
        (lambda: hw.plan(SCORES, amount=0.3), "plan: amount .*remove=0.3"),
        (lambda: hw.plan(SCORES, keep=0.7), "plan: keep .*the share of heads to remove: 1 - keep"),
        (lambda: hw.prune(LAYER, heads_to_prune={0: [1]}), "prune: heads_to_prune .*plan="),
        (lambda: hw.load("model", torch_dtype=torch.float16), "load: torch_dtype .*Give dtype="),
        (lambda: hw.importance(LAYER, texts=["a"]), "importance: texts .*batches="),
    ],
)
def test_a_familiar_argument_leads_to_ours(call, message: str) -> None:
    with pytest.raises(UnknownArgumentError, match=message):
        call()


def test_every_suggestion_begins_with_an_argument_or_an_expression() -> None:
    tables = {name: x for name, x in vars(_argument_names).items() if isinstance(x, dict)}
    doors = {
        "ATTEND": hw.attend, "FORWARD": hw.MultiHeadAttention.forward, "PLAN": hw.plan,
        "LAYER": hw.MultiHeadAttention, "PRUNE": hw.prune, "LOAD": hw.load,
        "IMPORTANCE": hw.importance,
    }  # fmt: skip
    for table, door in doors.items():
        arguments = inspect.signature(door).parameters
        for other, advice in tables[table].items():
            assert other not in arguments, (table, other)
            given, is_argument, _ = advice.partition("=")
            assert not (is_argument and given.isidentifier()) or (
                given in arguments or "when the layer" in advice or "of a layer" in advice
            ), (table, other, advice)


def test_errors_inside_and_missing_arguments_stay_as_they_are() -> None:
    @suggests({"size": "width="})
    def divide(width: int) -> float:
        return width / "two"  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand") as inside:
        divide(3)
    with pytest.raises(TypeError, match="missing") as missing:
        divide()
    with pytest.raises(TypeError, match="positional") as twice:
        divide(1, 2)  # nothing of it could be named
    for caught in (inside, missing, twice):
        assert not isinstance(caught.value, UnknownArgumentError)
    with pytest.raises(UnknownArgumentError, match=r"size has another name here\. Give width="):
        divide(size=3)


def test_the_signature_is_that_of_the_function() -> None:
    assert [*inspect.signature(hw.plan).parameters][:2] == ["scores", "remove"]
    assert inspect.signature(hw.plan).parameters["remove"].kind is inspect.Parameter.KEYWORD_ONLY

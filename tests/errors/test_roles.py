"""Each refusal when roles are evaluated says what is wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import headwise as hw
from headwise.corpora import AnnotatedText, Choice, Example, name_texts, read_examples
from headwise.errors import ArgumentError, HeadError, InputError, ShapeError, UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.ownership import check_edits_reach, edit_heads, find_attentions
from headwise.roles import (
    AlignedBatch,
    ChoiceRelation,
    Evidence,
    FoundHeads,
    Pairs,
    Roles,
    TokenText,
    agreement,
    behavior,
    find_roles,
    induction,
    name_moving,
    translation,
)
from headwise.roles.relations import tokenize
from planted import TOKENIZER, Planted, PlantedGPT, lines
from planted_pairs import PlantedPairs, sharp_t5, spelled

MODEL = Planted([("offset -1",)], causal=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": 0}, r"models=0\. Give 1 or more"),
        ({"splits": 0}, r"splits=0\. Give 1 or more"),
        ({"seed": -1}, r"seed=-1\. Give 0 or more"),
        ({"nulls": ("permuted", "reversed")}, r"no null 'reversed'\. Choose from permuted"),
    ],
)
def test_evidence_that_cannot_be_had(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"Evidence: {message}"):
        Evidence(**given)


FAST = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER)  # which cannot read an empty text


@pytest.mark.parametrize("tokenizer", [TOKENIZER, FAST])
@pytest.mark.parametrize("corpus", [[], ["", "  "]])
def test_a_corpus_without_tokens(corpus, tokenizer):
    distinct = len(corpus)
    with pytest.raises(InputError, match=rf"find_roles: {distinct} texts hold no token"):
        find_roles(MODEL, corpus, tokenizer=tokenizer)


def test_a_corpus_that_is_no_list_of_texts():
    with pytest.raises(ArgumentError, match=r"find_roles: texts is 7, a int\. Give a str or A"):
        find_roles(MODEL, 7, tokenizer=TOKENIZER)


def test_a_null_of_examples_is_none_of_roles():
    with pytest.raises(ArgumentError, match=r"find_roles: the null 'exchanged' is of examples"):
        find_roles(MODEL, lines(8), tokenizer=TOKENIZER, evidence=Evidence(("exchanged",)))


@pytest.mark.parametrize("name", ["self", "induction", "prefix matching"])
def test_a_custom_role_with_a_taken_name(name):
    with pytest.raises(ArgumentError, match=rf"find_roles: '{name}' is a role already"):
        find_roles(MODEL, lines(3), tokenizer=TOKENIZER, relations={name: lambda text: []})


def test_a_pair_outside_the_text():
    with pytest.raises(ArgumentError, match=r"'far' gives \(0, 99\) for a text of 2[0-9] tokens"):
        find_roles(MODEL, lines(3), tokenizer=TOKENIZER, relations={"far": lambda text: [(0, 99)]})


class Weightless(torch.nn.Module):
    config = MODEL.config

    def forward(self, input_ids, attention_mask):
        x = torch.nn.functional.one_hot(input_ids, 50).float()[:, None]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class Deaf(torch.nn.Module):
    def forward(self, input_ids, attention_mask):
        return input_ids


class Hasty(Planted):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids[:, :-2], attention_mask[:, :-2])


class Both(Planted):
    def __init__(self):
        super().__init__([("offset -1",)], causal=True)
        self.config = SimpleNamespace(context=48, is_encoder_decoder=True)

    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None):
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize(
    ("model", "nulls", "message"),
    [
        (Weightless(), ("permuted",), "Weightless has no weight matrix to permute"),
        (MODEL, ("random",), "Evidence: Planted has no known initialization .*Leave 'random' out"),
        (Deaf(), None, "no self-attention of Deaf was captured"),
        (Hasty([("first",)], causal=True), None, r"Hasty was given 3 texts of 2\d .* to 3 of"),
        (Both(), None, "find_roles: Both reads two texts, and .* encoder"),
    ],
)
def test_a_model_that_cannot_be_scored(model: Any, nulls: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        find_roles(model, lines(3), tokenizer=TOKENIZER, evidence=Evidence(nulls))


def test_a_slow_tokenizer():
    class Slow:
        is_fast = False

    with pytest.raises(UnsupportedError, match=r"tokenize: Slow cannot say .*use_fast=True"):
        tokenize(Slow(), [AnnotatedText("a")], 8)


def test_a_word_longer_than_the_context():
    spelled = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    with pytest.raises(InputError, match=r"tokenize: 'aaaaaaaaaa' has more tokens .* \(8\)"):
        tokenize(spelled, [AnnotatedText("b aaaaaaaaaa")], 8)


@pytest.fixture(scope="module")
def roles():
    return find_roles(MODEL, lines(6), tokenizer=TOKENIZER, evidence=Evidence(nulls=()))


@pytest.mark.parametrize("ask", [Roles.why, Roles.examples, Roles.of])
def test_a_missing_head(roles, ask):
    with pytest.raises(HeadError, match=r"L7\.H0"):
        ask(roles, "L7.H0")


def test_a_file_that_holds_no_roles(roles, tmp_path):
    path = roles.save(tmp_path / "roles.json")
    said = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**said, "headwise_roles": 99}), "utf-8")
    with pytest.raises(InputError, match=r"Roles\.load: .* schema 99, not 2"):
        Roles.load(path)
    path.write_text(json.dumps({**said, "heads": [{"name": "L0.H0"}]}), "utf-8")
    with pytest.raises(InputError, match=r"Roles\.load: .* is incomplete or damaged"):
        Roles.load(path)


def test_texts_of_mostly_unknown_tokens():
    with pytest.raises(InputError, match=r"find_roles: 80% of the tokens .* are unknown to the"):
        find_roles(MODEL, ["una frase que nadie ,"], tokenizer=TOKENIZER)


def right(text: TokenText) -> Pairs:
    return ()


@pytest.mark.parametrize(("pairs", "candidates"), [(None, right), (right, [(1, 2)])])
def test_parts_of_a_choice_that_are_no_functions(pairs: Any, candidates: Any) -> None:
    with pytest.raises(ArgumentError, match=r"ChoiceRelation: (pairs|candidates) is .*Give a"):
        ChoiceRelation(pairs, candidates)


# Each refusal when effects are measured says what is wrong.


PREDICTS = PlantedGPT([("before",), ("induction",)])
CHOICE = Choice("w1 w2 w1", "w2", "w3")


@pytest.fixture(scope="module")
def predicting():
    return find_roles(PREDICTS, lines(6), tokenizer=TOKENIZER, evidence=Evidence(nulls=()))


def test_a_behavior_without_texts():
    with pytest.raises(ArgumentError, match="behavior: batches holds no batch"):
        behavior("mine", [], lambda output, batch: output)
    with pytest.raises(
        ArgumentError, match=r"behavior: none of these texts has a target for PlantedGPT"
    ):
        translation(PREDICTS, [AnnotatedText("w1 w2")], tokenizer=TOKENIZER)
    with pytest.raises(ArgumentError, match=r"none of these texts has a target for PlantedGPT"):
        induction(PREDICTS, ["w1 w2"], tokenizer=TOKENIZER)
    # One text has no other name for its control.
    for texts in ([AnnotatedText("w1 w2")], name_texts(1, names=["w1", "w2"])):
        with pytest.raises(ArgumentError, match=r"none of these texts has a target for PlantedGPT"):
            name_moving(PREDICTS, texts, tokenizer=TOKENIZER)


def test_two_choices_with_the_same_tokens():
    with pytest.raises(
        InputError, match=r"'w2' and 'w2' after 'w1' do not differ within .* first 48"
    ):
        agreement(PREDICTS, [Choice("w1", "w2", "w2")], tokenizer=TOKENIZER)


def test_a_choice_longer_than_the_context():
    far = Choice(" ".join(["w1"] * 60), "w2", "w3")
    with pytest.raises(
        InputError, match=r"'w2' and 'w3' after ' w1.* first 48 tokens\. Give .* fewer"
    ):
        agreement(PREDICTS, [far], tokenizer=TOKENIZER)


def test_a_model_that_looks_ahead():
    class Ahead(PlantedGPT):
        def forward(self, input_ids, attention_mask=None):
            return super().forward(input_ids.flip(1)).flip(1)

    with pytest.raises(UnsupportedError, match=r"behavior: Ahead looks ahead"):
        agreement(Ahead([("before",), ("induction",)]), [CHOICE], tokenizer=TOKENIZER)


def test_a_model_without_logits():
    class Headless(Planted):
        def forward(self, input_ids, attention_mask=None):
            return SimpleNamespace(last_hidden_state=super().forward(input_ids))

    with pytest.raises(UnsupportedError, match=r"behavior: Headless gives no logits for each"):
        agreement(Headless([("offset -1",)], causal=True), [CHOICE], tokenizer=TOKENIZER)


def test_behaviors_need_distinct_names(predicting):
    chosen = agreement(PREDICTS, [CHOICE], tokenizer=TOKENIZER)
    with pytest.raises(ArgumentError, match=r"effects: behaviors are named agreement, agreement\."):
        predicting.effects(PREDICTS, [chosen, chosen])
    with pytest.raises(ArgumentError, match=r"effects: behaviors are named nothing"):
        predicting.effects(PREDICTS, [])


def test_a_loss_that_is_nan(predicting):
    batches = [{"input_ids": torch.tensor([[8, 9, 8], [9, 8, 9]])}]
    broken = behavior("broken", batches, lambda output, batch: output[:, 0, 0].log())
    with pytest.raises(ArgumentError, match=r"effects: 'broken' is not finite on 2 of 2 texts"):
        predicting.effects(PREDICTS, [broken])


def test_a_loss_that_is_not_one_number_for_each_text(predicting):
    mean = behavior(
        "mean", [{"input_ids": torch.tensor([[8, 9]])}], lambda output, _: output.mean()
    )
    with pytest.raises(ShapeError, match=r"loss mean: shape \(\) for 1 texts\. Return one"):
        predicting.effects(PREDICTS, [mean])


def test_roles_of_another_model(predicting):
    model = PlantedGPT([("before", "even"), ("induction", "even")])
    with pytest.raises(
        ArgumentError, match=rf"effects: these are roles of the model {predicting.model}"
    ):
        predicting.effects(model, [agreement(model, [CHOICE], tokenizer=TOKENIZER)])


def test_effects_of_a_missing_head(predicting):
    with pytest.raises(HeadError, match=r"L7\.H0"):
        predicting.effects(
            PREDICTS, [agreement(PREDICTS, [CHOICE], tokenizer=TOKENIZER)], heads=["L7.H0"]
        )


def test_labels_without_a_control(predicting):
    task = induction(PREDICTS, lines(6), tokenizer=TOKENIZER, sequences=4)
    with pytest.raises(ArgumentError, match=r"'induction' has labels \{'prefix.* no control"):
        replace(task, control=())
    batches = [{"input_ids": torch.tensor([[8, 9, 8]])}]
    with pytest.raises(ArgumentError, match=r"Behavior: 'mine' has labels \{'r': 'moving'\}"):
        behavior("mine", batches, lambda output, _: output[:, 0, 0], labels={"r": "moving"})


def test_a_control_of_another_size(predicting):
    task = induction(PREDICTS, lines(6), tokenizer=TOKENIZER, sequences=4)
    fewer = induction(PREDICTS, lines(6), tokenizer=TOKENIZER, sequences=3)
    with pytest.raises(ArgumentError, match=r"'induction' has 4 texts and 3 of its control"):
        predicting.effects(PREDICTS, [replace(task, control=fewer.control)])


class Unprojected(torch.nn.Module):
    """Attention without an output projection; its output may be ignored."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.embed, self.read = torch.nn.Embedding(9, 4), read

    def forward(self, input_ids):
        x = self.embed(input_ids)[:, None]
        heads = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return (x + heads if self.read else x)[:, 0]


def test_heads_whose_output_is_never_read_cannot_be_edited():
    model, batch = Unprojected(read=False), {"input_ids": torch.tensor([[1, 2, 3]])}
    attentions = find_attentions(model, batch, needs_projections=False)
    with pytest.raises(UnsupportedError, match=r"edits of the heads of .* do not reach the output"):
        check_edits_reach(model, attentions, batch)
    with pytest.raises(UnsupportedError, match=r"has no output projection"):
        _ = attentions[0].output


def test_heads_without_a_projection_are_not_edited_under_gradients():
    model, batch = Unprojected(read=True), {"input_ids": torch.tensor([[1, 2, 3]])}
    attentions = find_attentions(model, batch, needs_projections=False)
    check_edits_reach(model, attentions, batch)
    with (
        edit_heads(model, attentions, lambda _, heads: heads * 0),
        pytest.raises(UnsupportedError, match=r"Unprojected has no output .*no_grad"),
    ):
        model(**batch)
    assert not model._forward_hooks


# Examples and files of task heads that cannot be used are refused.


CONFIG = MiniGPTConfig(vocab_size=60, context=24, d_model=12, n_heads=4, n_kv_heads=2, n_layers=1)
GOOD: dict[str, Any] = {
    "text": [3, 4, 5, 6, 7, 8],
    "query": (5, 6),
    "right": (0, 2),
    "wrong": (2, 4),
}


def _model() -> MiniGPT:
    torch.manual_seed(0)
    return MiniGPT(CONFIG).eval()


def _found() -> FoundHeads:
    examples = [Example(**GOOD | {"text": [n % 7, 4, 5, 6, 7, 8]}) for n in range(8)]
    return hw.find_heads(_model(), examples, evidence=hw.Evidence(nulls=()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": []}, r"has the text \[\]"),
        ({"text": [1.5, 2, 3, 4, 5, 6]}, "has the text"),
        ({"text": "a b"}, "strings without a tokenizer"),
        ({"answer": "a"}, "the answer 'a', and no tokenizer"),
        ({"query": (5, 7)}, r"query has \(5, 7\) in a text of 6 tokens"),
        ({"right": []}, r"right=\[\]"),
        ({"right": (2, 1)}, r"right has \(2, 1\)"),
        ({"wrong": 3}, "wrong has 3"),
        ({"wrong": (1, 3)}, r"\(0, 2\) and \(1, 3\) of right and wrong share a token"),
        ({"text": [1] * 30}, "30 tokens and an answer of 0, and the model reads 24"),
        ({"inputs": {"pixels": torch.ones(1, 3)}}, r"inputs \{'pixels': \(3,\)\}, and the first"),
    ],
)
def test_a_malformed_example_is_refused(change: dict[str, Any], message: str) -> None:
    examples = [Example(**GOOD), Example(**GOOD | change)]
    with pytest.raises(ArgumentError, match=message):
        hw.find_heads(_model(), examples)


@pytest.mark.parametrize(
    "inputs",
    [{"pixels": [1.0]}, {"input_ids": torch.ones(1, 6)}, {"pixels": torch.ones(1, 3, 5)}],
)
def test_inputs_of_examples_that_make_no_batch_are_refused(inputs: dict[str, Any]) -> None:
    same = [inputs, {"pixels": torch.ones(1, 3, 4)} if "pixels" in inputs else inputs]
    examples = [Example(**GOOD, inputs=given) for given in same[::-1]]
    with pytest.raises(ArgumentError, match=r"has the inputs \{'(pixels|input_ids)': .*Give each"):
        hw.find_heads(_model(), examples)


def test_too_few_examples_and_other_models_are_refused() -> None:
    with pytest.raises(ArgumentError, match="1 examples"):
        hw.find_heads(_model(), Example(**GOOD))
    with pytest.raises(ArgumentError, match="examples is 'a'"):
        hw.find_heads(_model(), "a")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"Evidence\(splits=3\)"):
        hw.find_heads(_model(), [Example(**GOOD)] * 2, evidence=hw.Evidence(splits=3))
    with pytest.raises(ArgumentError, match="most=0"):
        hw.find_heads(_model(), [Example(**GOOD)] * 2, most=0)
    with pytest.raises(ArgumentError, match="the model reads 5"):
        hw.find_heads(_model(), [Example(**GOOD)] * 2, max_tokens=5)
    with pytest.raises(UnsupportedError, match="T5ForConditionalGeneration reads two texts"):
        hw.find_heads(sharp_t5(), [Example(**GOOD)] * 2)


def test_answers_of_a_model_without_logits_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="BertModel gives no logits"):
        hw.find_heads(
            zoo.make("Bert"), [Example(**GOOD, answer=[3])] * 4, evidence=hw.Evidence(nulls=())
        )


def test_characters_without_a_token_are_refused() -> None:
    example = Example("w1 w2 w3", query=(6, 8), right=(2, 3), wrong=(0, 2))
    with pytest.raises(ArgumentError, match=r"right has \(2, 3\), ' '"):
        hw.find_heads(_model(), [example] * 2, tokenizer=TOKENIZER)


def test_exports_that_no_tool_reads_are_refused(tmp_path: Path) -> None:
    found = _found()
    path, heads = tmp_path / "a.json", ["L0.H0"]
    with pytest.raises(ArgumentError, match="no format 'onnx'"):
        found.export(path, "onnx", model_name="a/b", heads=heads)
    with pytest.raises(ArgumentError, match="model_name=None"):
        found.export(path, "vllm-hook", heads=heads)
    with pytest.raises(ArgumentError, match="the set was not tested"):
        found.export(path, "vllm-hook", model_name="a/b")
    with pytest.raises(ArgumentError, match=r"ends in '\.json'"):
        found.export(path, "qrhead", model_name="a/b", heads=heads)
    with pytest.raises(ArgumentError, match=r"ends in '\.txt'"):
        found.save(tmp_path / "heads.txt")
    with pytest.raises(HeadError, match=r"no head L7\.H0"):
        found.export(path, "vllm-hook", model_name="a/b", heads="L7.H0")
    assert not list(tmp_path.iterdir())


def test_a_head_of_a_stack_is_not_exported(tmp_path: Path) -> None:
    found = _found()
    rows = found.frame().assign(name=[f"decoder.{name}" for name in found.frame()["name"]])
    stacked = FoundHeads(rows, found.heads, found.set_row)
    with pytest.raises(HeadError, match=r"L0\.H0 is no head of cross-attention, and ctranslate2"):
        found.export(tmp_path, "ctranslate2", heads="L0.H0")
    with pytest.raises(HeadError, match=r"decoder\.L0\.H0 belongs to a stack"):
        stacked.export(tmp_path / "a.json", "vllm-hook", model_name="a/b", heads="decoder.L0.H0")


CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda c: c.pop("set"),
    lambda c: c.update(format="headwise-heads/2"),
    lambda c: c["heads"][0].update(name="L9"),
    lambda c: c["heads"][0].update(layer=3),
    lambda c: c["heads"].append(c["heads"][0]),
    lambda c: c["heads"][0].update(found="yes"),
    lambda c: c["heads"][0].update(effect="much"),
    lambda c: c["heads"][0].update(effect=True),
    lambda c: c["heads"][0].update(error=1.0),
    lambda c: c["heads"][0].pop("n"),
    lambda c: c["set"].update(heads=["L5.H0"]),
    lambda c: c["set"].update(heads="L0.H0"),
    lambda c: c["texts"].update(examples=1.5),
    lambda c: c["model"].update(name=None),
    lambda c: c.update(heads=[3]),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_changed_file_is_refused(number: int, tmp_path: Path) -> None:
    path = _found().save(tmp_path / "heads.json")
    content = json.loads(path.read_text())
    CHANGES[number](content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"load_heads: .* holds no heads"):
        hw.load_heads(path)


LINE: dict[str, Any] = {"text": "ab cd", "query": [3, 5], "right": [[0, 1]], "wrong": [[1, 2]]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: not JSON \(Expecting .* at character 2\)\. Give one"),
        ("[]", "line 2: '\\[\\]' is not an object"),
        (json.dumps({k: v for k, v in LINE.items() if k != "query"}), "is not an object with text"),
        (json.dumps(LINE | {"ids": [1]}), "is not an object with text or ids"),
        (json.dumps(LINE | {"doc": 1}), "'doc' is not a key"),
        (json.dumps(LINE | {"text": 3}), "its text is 3"),
        (json.dumps(LINE | {"answer": 3.5}), "its answer is 3.5"),
        (json.dumps(LINE | {"query": [3.5, 5]}), r"query is \[3.5, 5\]"),
        (json.dumps(LINE | {"right": [3]}), r"right is \[3\]"),
    ],
)
def test_a_malformed_line_is_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{line}\n", "utf-8")
    with pytest.raises(InputError, match=message):
        read_examples(path)


def test_a_file_without_examples_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="holds no example"):
        read_examples(tmp_path / "empty.jsonl")
    (tmp_path / "one.jsonl").write_text(json.dumps(LINE | {"answer": "x"}))
    assert read_examples(tmp_path / "one.jsonl") == [
        Example("ab cd", [(3, 5)], [(0, 1)], [(1, 2)], "x")
    ]


# Alignments that cannot be computed are refused.


SOURCES, TARGETS = [[5, 9, 7, 3, 11, 4]], [[6, 2, 7]]


def test_bad_pairs_are_refused() -> None:
    model = sharp_t5()
    source = {"input_ids": torch.tensor([SOURCES[0]])}
    with pytest.raises(ArgumentError, match="heads=None, and T5ForConditionalGeneration"):
        hw.align(model, source, TARGETS)
    with pytest.raises(HeadError, match=r"no head \(5, 0\)"):
        hw.align(model, source, TARGETS, heads=(5, 0))
    with pytest.raises(ArgumentError, match=r"heads=\[\]"):
        hw.align(model, source, TARGETS, heads=[])
    with pytest.raises(ArgumentError, match=r"outputs=\[6, 2, 7\]"):
        hw.align(model, source, TARGETS[0], heads=(0, 0))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="output 1 has no token"):
        hw.align(model, source, [*TARGETS, []], heads=(0, 0))
    states = torch.zeros(1, 6, 32)
    for encoded, kind in ((states, "Tensor"), ({"last_hidden_state": states}, "dict")):
        with pytest.raises(ArgumentError, match=f"encoder_outputs is a {kind}"):
            hw.align(model, {"encoder_outputs": encoded}, TARGETS, heads=(0, 0))
    batch = spelled(2, 0)
    for wrong, message in (
        (AlignedBatch(batch.inputs, batch.outputs, [[], []]), "spans of"),
        (AlignedBatch(batch.inputs, batch.outputs, [[(2, 2)] * len(o) for o in batch.outputs]),
         r"a span is \(2, 2\)"),
        (AlignedBatch(batch.inputs, batch.outputs, [[(0, 99)] * len(o) for o in batch.outputs]),
         "in a source of"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            hw.find_alignment_heads(PlantedPairs(), wrong)
    with pytest.raises(ArgumentError, match="most=0"):
        hw.find_alignment_heads(PlantedPairs(), batch, most=0)


def test_a_model_without_cross_attention_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="has no function that shifts labels"):
        hw.align(zoo.make("Bert"), {"input_ids": torch.tensor([[3]])}, [[4]], heads=(0, 0))

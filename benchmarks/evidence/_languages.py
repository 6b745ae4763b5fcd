"""Two generated languages with gold annotations, and encoders trained on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headwise.corpora import AnnotatedText, Arc, Grammar, Pair, Span, annotate

SPECIALS = PADDING, UNKNOWN, FIRST, LAST, MASK = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
NOUNS = ("dog", "cat", "boy", "girl", "friend", "teacher", "farmer", "doctor", "bird", "king")
INTRANSITIVE = ("run", "sleep", "sing", "wait", "laugh", "work", "smile", "fall")
TRANSITIVE = ("see", "help", "follow", "greet", "like", "know", "meet", "call")
ADJECTIVES = ("old", "young", "small", "tall", "quiet", "clever")
ADPOSITIONS = ("near", "behind", "beside", "with")
ADVERBS = ("often", "never", "always", "rarely")
MODIFIED = 0.3  # of the nouns have an adjective, and of the verbs an adverb


@dataclass(frozen=True)
class Language:
    """Sentences to train on.

    Attributes:
        vocabulary: Every word.
        draw: Draws a sentence.
        task: What the trained model is evaluated on, in words.
        alternatives: The words that the word at a place of a text is chosen among when it is
            masked, itself included; None for a word that is not evaluated.
    """

    vocabulary: Sequence[str]
    draw: Callable[[np.random.Generator], AnnotatedText]
    task: str
    alternatives: Callable[[AnnotatedText, int], Sequence[str] | None]


def translated() -> Language:
    """The sentences of the project's grammar, in two languages."""
    grammar = Grammar(repeat_share=0.0)
    words = grammar.vocabulary
    return Language(
        words,
        lambda rng: annotate(grammar.sentence(rng)),
        "a masked verb, chosen among all words",
        lambda text, place: words if text.tags[place] == "VERB" else None,
    )


def attracted() -> Language:
    """English sentences in which other nouns stand between a verb and the noun it agrees with."""
    forms = {form: (verb, f"{verb}s") for verb in (*INTRANSITIVE, *TRANSITIVE)
             for form in (verb, f"{verb}s")}  # fmt: skip
    nouns = [form for noun in NOUNS for form in (noun, f"{noun}s")]
    words = ("the", "that", *nouns, *ADJECTIVES, *ADPOSITIONS, *ADVERBS, *forms)
    return Language(
        words,
        _attracted,
        "the number of a masked verb",
        lambda text, place: forms.get(text.word(place)),
    )


@dataclass
class _Sentence:
    """A sentence that is being written."""

    rng: np.random.Generator
    words: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    arcs: list[Arc] = field(default_factory=list)
    controllers: list[Pair] = field(default_factory=list)

    def add(self, tag: str, choices: Sequence[str]) -> int:
        self.words.append(str(self.rng.choice(choices)))
        self.tags.append(tag)
        return len(self.words) - 1

    def arc(self, dependent: int, head: int, relation: str) -> None:
        self.arcs.append(Arc(dependent, head, relation))

    def noun(self, plural: bool) -> int:
        before = [(self.add("DET", ["the"]), "det")]
        if self.rng.random() < MODIFIED:
            before.append((self.add("ADJ", ADJECTIVES), "amod"))
        noun = self.add("NOUN", [f"{noun}s" if plural else noun for noun in NOUNS])
        for word, relation in before:
            self.arc(word, noun, relation)
        return noun

    def verb(self, verbs: Sequence[str], plural: bool, controller: int) -> int:
        adverb = self.add("ADV", ADVERBS) if self.rng.random() < MODIFIED else None
        verb = self.add("VERB", [verb if plural else f"{verb}s" for verb in verbs])
        if adverb is not None:
            self.arc(adverb, verb, "advmod")
        self.controllers.append(Pair(verb, controller, "noun of agreement"))
        return verb

    def text(self) -> AnnotatedText:
        return AnnotatedText(
            " ".join(self.words),
            _spans(self.words),
            tuple(self.tags),
            tuple(self.arcs),
            pairs=tuple(self.controllers),
        )


def _attracted(rng: np.random.Generator) -> AnnotatedText:
    """`the dogs run`, with a phrase or a relative clause after the subject in three of four."""
    sentence = _Sentence(rng)
    plural, other = (bool(draw) for draw in rng.integers(2, size=2))
    subject = sentence.noun(plural)
    kind = rng.integers(4)
    if kind == 1:  # the dogs near the cat run
        adposition = sentence.add("ADP", ADPOSITIONS)
        noun = sentence.noun(other)
        sentence.arc(adposition, noun, "case")
        sentence.arc(noun, subject, "nmod")
    elif kind == 2:  # the dogs that the cat sees run
        that, noun = sentence.add("PRON", ["that"]), sentence.noun(other)
        verb = sentence.verb(TRANSITIVE, other, noun)
        sentence.arc(that, verb, "obj")
        sentence.arc(noun, verb, "nsubj")
        sentence.arc(verb, subject, "acl")
    elif kind == 3:  # the dogs that see the cat run
        that = sentence.add("PRON", ["that"])
        verb = sentence.verb(TRANSITIVE, plural, subject)
        sentence.arc(that, verb, "nsubj")
        sentence.arc(sentence.noun(other), verb, "obj")
        sentence.arc(verb, subject, "acl")
    sentence.arc(subject, sentence.verb(INTRANSITIVE, plural, subject), "nsubj")
    return sentence.text()


def with_mask(text: AnnotatedText, place: int) -> AnnotatedText:
    """The text with a masked word, and its own relations of that word alone."""
    words = [text.word(n) for n in range(len(text.words))]
    words[place] = MASK
    pairs = tuple(pair for pair in text.pairs if pair.query == place)
    return AnnotatedText(" ".join(words), _spans(words), text.tags, text.arcs, pairs=pairs)


def _spans(words: Sequence[str]) -> tuple[Span, ...]:
    """Where words stand in a text, with a space between them."""
    ends = np.cumsum([len(word) + 1 for word in words]).tolist()
    return tuple((end - 1 - len(word), end - 1) for word, end in zip(words, ends, strict=True))


def new_tokenizer(vocabulary: Sequence[str]) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of whole words, with BERT's special tokens around a text.

    The mask is a word like any other, so that it can be the query of a relation.
    """
    ordinary = [word for word in vocabulary if not word.startswith("<")]
    ids = {word: number for number, word in enumerate(dict.fromkeys([*SPECIALS, *ordinary]))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{FIRST} $A {LAST}", special_tokens=[(name, ids[name]) for name in (FIRST, LAST)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PADDING, unk_token=UNKNOWN, cls_token=FIRST,
        sep_token=LAST,
    )  # fmt: skip


def new_encoder(words: int, seed: int) -> transformers.BertForMaskedLM:
    """A BERT of 4 layers of 8 heads with random weights."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=words, hidden_size=128, num_hidden_layers=4, num_attention_heads=8,
        intermediate_size=256, max_position_embeddings=48, attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)

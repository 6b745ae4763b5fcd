"""The words of the grammar: pronouns, adverbs, and thirty verbs in two languages and tenses."""

from collections.abc import Mapping

PRONOUNS: Mapping[str, str] = {
    "I": "yo",
    "you": "tú",
    "he": "él",
    "she": "ella",
    "we": "nosotros",
    "y'all": "ustedes",
    "they": "ellos",
}
ADVERBS: Mapping[str, str] = {
    "always": "siempre",
    "never": "nunca",
    "also": "también",
    "now": "ahora",
    "already": "ya",
    "rarely": "raramente",
    "usually": "normalmente",
}
TENSES = ("present", "past")  # the past is the English simple past, the Spanish imperfect

# fmt: off
VERBS: Mapping[str, str] = {
    "work": "trabajar", "talk": "hablar", "sing": "cantar", "dance": "bailar", "cook": "cocinar",
    "buy": "comprar", "watch": "mirar", "swim": "nadar", "carry": "llevar", "study": "estudiar",
    "eat": "comer", "drink": "beber", "run": "correr", "learn": "aprender", "sell": "vender",
    "break": "romper",
    "live": "vivir", "write": "escribir", "open": "abrir", "climb": "subir",
    "receive": "recibir", "share": "compartir",
    "be": "ser", "have": "tener", "go": "ir", "do": "hacer", "say": "decir", "see": "ver",
    "want": "querer", "sleep": "dormir",
}
_PERSON = {"I": 0, "you": 1, "he": 2, "she": 2, "we": 3, "y'all": 4, "they": 4}

_ENGLISH_PAST = {
    "sing": "sang", "buy": "bought", "swim": "swam", "eat": "ate", "drink": "drank",
    "run": "ran", "sell": "sold", "break": "broke", "write": "wrote", "have": "had",
    "go": "went", "do": "did", "say": "said", "see": "saw", "sleep": "slept",
}
_ENGLISH_IRREGULAR = {
    ("be", "present"): "am are is are are",
    ("be", "past"): "was were was were were",
    ("have", "present"): "have have has have have",
}
_SPANISH_IRREGULAR = {
    ("ser", "present"): "soy eres es somos son",
    ("ser", "past"): "era eras era éramos eran",
    ("tener", "present"): "tengo tienes tiene tenemos tienen",
    ("ir", "present"): "voy vas va vamos van",
    ("ir", "past"): "iba ibas iba íbamos iban",
    ("hacer", "present"): "hago haces hace hacemos hacen",
    ("decir", "present"): "digo dices dice decimos dicen",
    ("ver", "present"): "veo ves ve vemos ven",
    ("ver", "past"): "veía veías veía veíamos veían",
    ("querer", "present"): "quiero quieres quiere queremos quieren",
    ("dormir", "present"): "duermo duermes duerme dormimos duermen",
}
_SPANISH_ENDINGS = {
    ("ar", "present"): "o as a amos an",
    ("er", "present"): "o es e emos en",
    ("ir", "present"): "o es e imos en",
    ("ar", "past"): "aba abas aba ábamos aban",
    ("er", "past"): "ía ías ía íamos ían",
    ("ir", "past"): "ía ías ía íamos ían",
}
# fmt: on


def english_form(verb: str, tense: str, pronoun: str) -> str:
    """The form of an English verb beside a pronoun: `carry`, present, she: `carries`."""
    if (verb, tense) in _ENGLISH_IRREGULAR:
        return _ENGLISH_IRREGULAR[verb, tense].split()[_PERSON[pronoun]]
    if tense == "past":
        return _ENGLISH_PAST.get(verb) or _with_ed(verb)
    return _with_s(verb) if pronoun in ("he", "she") else verb


def spanish_form(verb: str, tense: str, pronoun: str) -> str:
    """The form of the Spanish verb that translates it: `carry`, present, she: `lleva`.

    Latin American: `ustedes` takes the form of `ellos`.
    """
    infinitive, person = VERBS[verb], _PERSON[pronoun]
    if (infinitive, tense) in _SPANISH_IRREGULAR:
        return _SPANISH_IRREGULAR[infinitive, tense].split()[person]
    stem, ending = infinitive[:-2], infinitive[-2:]
    return stem + _SPANISH_ENDINGS[ending, tense].split()[person]


def _with_s(verb: str) -> str:
    if verb.endswith(("s", "sh", "ch", "x", "z", "o")):
        return verb + "es"
    return verb[:-1] + "ies" if _ends_in_consonant_y(verb) else verb + "s"


def _with_ed(verb: str) -> str:
    if verb.endswith("e"):
        return verb + "d"
    return verb[:-1] + "ied" if _ends_in_consonant_y(verb) else verb + "ed"


def _ends_in_consonant_y(verb: str) -> bool:
    return verb.endswith("y") and verb[-2] not in "aeiou"

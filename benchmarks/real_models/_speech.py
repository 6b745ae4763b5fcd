"""Speech whose word times are known, because two synthesizers say when each word begins and ends.

`espeak-ng` and `festival` are packages of Debian. They share no code and no voice: formants
against recorded diphones. Waveforms have 16,000 samples a second, as Whisper takes them.
"""

import ctypes
import subprocess
import tempfile
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np

RATE = 16_000
Word = tuple[float, float, str]  # its start and its end in seconds
Utterance = tuple[np.ndarray, list[Word]]
_OPENERS = (
    "Yesterday,",
    "In the morning,",
    "After lunch,",
    "Nobody knew why, but",
    "Suddenly,",
    "",
)
_ADJECTIVES = ("old", "careful", "hungry", "beautiful", "small", "impatient", "quiet", "famous")
_NOUNS = ("farmer", "doctor", "neighbor", "elephant", "captain", "child", "professor", "cat")
_VERBS = (
    "carried",
    "remembered",
    "painted",
    "found",
    "delivered",
    "bought",
    "dropped",
    "described",
)
_THINGS = ("seven red apples", "a wooden table", "the letter", "an enormous umbrella", "two keys",
           "some bread", "the photograph", "every window")  # fmt: skip
_ENDS = ("near the river", "without a word", "for his sister, and then went home",
         "while the others, tired and cold, waited outside", "before the train left", "at night",
         "although it rained", "in the university library")  # fmt: skip


def sentences(n: int, seed: int) -> list[str]:
    """Sentences of 6 to 20 words, some of which have pauses within."""
    rng = Random(seed)
    parts = (_OPENERS, ("the", "our", "that"), _ADJECTIVES, _NOUNS, _VERBS, _THINGS, _ENDS)
    drawn = (" ".join(map(rng.choice, parts)).strip() for _ in range(n))
    return [f"{text[0].upper()}{text[1:]}." for text in drawn]


def espeak(texts: Sequence[str], seed: int, voices: Sequence[str] = ("en-us",)) -> list[Utterance]:
    """Spoken by espeak-ng, at 120 to 200 words a minute, by each of the voices in turn.

    Its events say where a word and a phoneme begin: a word ends where the next one begins, or a
    pause, which is a phoneme named `_` and further letters.
    """
    library = ctypes.CDLL("libespeak-ng.so.1")
    rate = library.espeak_Initialize(2, 0, None, 1)  # synchronous; with events of phonemes
    samples: list[np.ndarray] = []
    events: list[tuple[int, int, int, int, bytes]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Event))
    def receive(sound, length, received):
        if sound and length:
            samples.append(np.frombuffer(ctypes.string_at(sound, 2 * length), np.int16))
        row = 0
        while received[row].type:
            event = received[row]
            events.append((event.type, event.text, event.length, event.sample, event.name))
            row += 1
        return 0

    library.espeak_SetSynthCallback(receive)
    rng, spoken = Random(seed), []
    for number, text in enumerate(texts):
        samples.clear()
        events.clear()
        library.espeak_SetVoiceByName(voices[number % len(voices)].encode())
        library.espeak_SetParameter(1, rng.randint(120, 200), 0)
        encoded = text.encode()
        library.espeak_Synth(encoded, len(encoded) + 1, 0, 1, 0, 1, None, None)
        words = [event for event in events if event[0] == 1]
        pauses = [event[3] for event in events if event[0] == 7 and event[4][:1] in (b"_", b"")]
        borders = [*(event[3] for event in words), *pauses, sum(map(len, samples))]
        times = [
            (
                start / rate,
                min((at for at in borders if at > start), default=start) / rate,
                text[at - 1 : at - 1 + n],
            )
            for _, at, n, start, _ in words
        ]
        spoken.append((_resampled(np.concatenate(samples) / 32768, rate), times))
    library.espeak_Terminate()
    return _led_in(texts, spoken, rng)


class _Event(ctypes.Structure):
    """`espeak_EVENT` of speak_lib.h, where the name of a phoneme is one member of a union."""

    _fields_ = (
        ("type", ctypes.c_int), ("id", ctypes.c_uint), ("text", ctypes.c_int),
        ("length", ctypes.c_int), ("milliseconds", ctypes.c_int), ("sample", ctypes.c_int),
        ("user", ctypes.c_void_p), ("name", ctypes.c_char * 8),
    )  # fmt: skip


def festival(texts: Sequence[str], seed: int) -> list[Utterance]:
    """Spoken by festival's kal_diphone, .8 to 1.3 times as slowly as it is by default.

    It says where a word and a segment end: a word begins where the segment before it ends, a pause
    or the word before it.
    """
    rng, spoken = Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        script = []
        for number, text in enumerate(texts):
            name = f"{folder}/{number}"
            script += [
                f"(Parameter.set 'Duration_Stretch {rng.uniform(0.8, 1.3):.3f})",
                f'(set! utt (utt.synth (Utterance Text "{text}")))',
                f'(utt.save.wave utt "{name}.wav" \'riff)',
                f'(utt.save.words utt "{name}.words")',
                f'(utt.save.segs utt "{name}.segs")',
            ]
        Path(folder, "all.scm").write_text("\n".join(script))
        subprocess.run(["festival", "-b", f"{folder}/all.scm"], check=True)
        for number in range(len(texts)):
            name = f"{folder}/{number}"
            ends = [0.0, *(end for end, _ in _labels(f"{name}.segs"))]
            names = ["pau", *(label for _, label in _labels(f"{name}.segs"))]
            pauses = [end for end, label in zip(ends, names, strict=True) if label == "pau"]
            times, before = [], 0.0
            for end, word in _labels(f"{name}.words"):
                times.append((max([before, *(at for at in pauses if at < end)]), end, word))
                before = end
            with wave.open(f"{name}.wav") as file:
                sound = np.frombuffer(file.readframes(file.getnframes()), np.int16)
                spoken.append((_resampled(sound / 32768, file.getframerate()), times))
    return _led_in(texts, spoken, rng)


def _labels(path: str) -> list[tuple[float, str]]:
    """The ends and the names in a label file of festival."""
    lines = Path(path).read_text().partition("#\n")[2].splitlines()
    return [(float(end), name) for end, _, name in map(str.split, lines)]


def _resampled(sound: np.ndarray, rate: int) -> np.ndarray:
    """A waveform at `RATE`, by cutting its spectrum off."""
    length = round(len(sound) * RATE / rate)
    spectrum = np.fft.rfft(sound)[: length // 2 + 1]
    return np.fft.irfft(spectrum, length).astype(np.float32) * np.float32(length / len(sound))


def _led_in(texts: Sequence[str], spoken: list[Utterance], rng: Random) -> list[Utterance]:
    """With silence around each sound; only those with a time for every word.

    A synthesizer may run short words together. Words are written as in the text, without commas.
    """
    kept = []
    for text, (sound, times) in zip(texts, spoken, strict=True):
        words, lead = text.replace(",", "").rstrip(".").split(), rng.uniform(0, 1)
        starts = [start for start, _, _ in times]
        own = len(set(starts)) == len(starts) and all(start < stop for start, stop, _ in times)
        if not own or [word.lower() for _, _, word in times] != [word.lower() for word in words]:
            continue
        silence, end = np.zeros(round(lead * RATE), np.float32), np.zeros(RATE // 2, np.float32)
        shifted = [
            (start + lead, stop + lead, word)
            for (start, stop, _), word in zip(times, words, strict=True)
        ]
        kept.append((np.concatenate([silence, sound, end]), shifted))
    return kept


SYNTHESIZERS: dict[str, Callable[[Sequence[str], int], list[Utterance]]] = {
    "espeak-ng": espeak,
    "festival": festival,
}

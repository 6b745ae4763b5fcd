"""A tiny random model and an input of many architectures, by the name of its class."""

from architectures.cases import ArchitectureCase
from architectures.images import IMAGES
from architectures.mixed import MIXED
from architectures.pairs import PAIRS
from architectures.sound import SERIES, SOUND
from architectures.text import TEXT

GROUPS: dict[str, dict[str, ArchitectureCase]] = {
    "Decoders and encoders of text": TEXT,
    "Encoder-decoders of text": PAIRS,
    "Images and video": IMAGES,
    "Images beside text": MIXED,
    "Sound": SOUND,
    "Series and trajectories": SERIES,
}
CASES = {name: case for group in GROUPS.values() for name, case in group.items()}
# One of each kind: decoders, encoders, states beside attention, attention by hand and of no kind
# that is known, pairs, images, both, sounds, series; all are tried by hand with `make zoo`.
SAMPLE = (
    "Llama", "NystromformerModel", "OlmoeForCausalLM", "SwinModel", "BitNetForCausalLM",
    "CLIPModel", "DetrForObjectDetection", "FNetModel", "JambaForCausalLM", "MusicgenForCausalLM",
    "PatchTSTModel", "SiglipVisionModel", "T5ForConditionalGeneration", "ViTMAEForPreTraining",
    "WhisperForConditionalGeneration",
)  # fmt: skip

__all__ = ["CASES", "GROUPS", "SAMPLE", "ArchitectureCase"]

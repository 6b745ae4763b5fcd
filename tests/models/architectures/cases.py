"""What an architecture is tried with: how its tiny model is made, and what it reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, HEADS, WIDTH = 23, 4, 24
Inputs = dict[str, Any]

# The usual names of the sizes in configurations.
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 40,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
}


@dataclass(frozen=True)
class ArchitectureCase:
    """An architecture in small.

    Attributes:
        build: Makes the model, with random weights.
        inputs: Makes a batch that it reads: its keyword arguments.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]

    def make(self) -> tuple[nn.Module, Inputs]:
        """The model in evaluation mode and a batch, the same ones in every call."""
        torch.manual_seed(1)
        model = self.build().eval()
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and name.endswith("bias"):  # biases of zeros prove nothing
                nn.init.normal_(weight, std=0.1)
        torch.manual_seed(2)
        return model, self.inputs()


def case(
    name: str, config: Mapping[str, Any], inputs: Callable[[], Inputs], of: str | None = None
) -> ArchitectureCase:
    """A class of transformers with a configuration; `of` names the class of the configuration."""

    def build() -> nn.Module:
        cls = getattr(transformers, name)
        config_cls = cls.config_class if of is None else getattr(transformers, of)
        model: nn.Module = cls(config_cls(**config))
        return model

    return ArchitectureCase(build, inputs)


def ids(texts: int = 2, tokens: int = 7) -> Tensor:
    """Token ids above those of special tokens."""
    return torch.randint(5, VOCABULARY, (texts, tokens))


def text() -> Inputs:
    return {"input_ids": ids()}


def pair() -> Inputs:
    return {"input_ids": ids(), "decoder_input_ids": ids(2, 5)}


def image(side: int = 8, channels: int = 3) -> Inputs:
    return {"pixel_values": torch.randn(2, channels, side, side)}


def video(frames: int = 2, side: int = 8) -> Inputs:
    return {"pixel_values": torch.randn(2, frames, 3, side, side)}


def wave(samples: int = 400) -> Inputs:
    return {"input_values": torch.randn(2, samples)}

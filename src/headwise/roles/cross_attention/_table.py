"""The alignment heads of an encoder-decoder, with their errors."""

from dataclasses import dataclass

import pandas as pd
from torch import nn

from headwise._display import counted
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import check_model, fingerprint
from headwise.tables import Head, at_prompt


@dataclass(frozen=True, eq=False)
class AlignmentHeads:
    """Cross-attention heads that align outputs with the source; numbers are of held-out examples.

    Errors are mean distances, in source positions, between the first position that an output is
    aligned with and the true one.

    Attributes:
        rows: A row per cross-attention head: its `error` with the interval (95 %, over examples),
            `accuracy`, the share of outputs whose largest weight lies in the true span, `chance`,
            the `n` outputs of `texts` examples, the error on the selection half (`chosen_half`),
            and whether it is in the set.
        heads: The heads of the set, in the order in which they joined.
        outcome: `found` if the set is closer than the best straight line with 95 % confidence,
            `not found`, or `not tested: ` and what is missing.
        error: The error of the set.
        ci_low: The lower end of its interval.
        ci_high: The upper end.
        last_half: The error of the mean of all heads of the last half of the layers.
        gain_over_last_half: The interval of what the set gains over these heads.
        straight_line: The error of the best straight line: outputs spread evenly over the source,
            or a line fitted to the places of outputs in the selection half.
        model: The fingerprint of the model's weights.
    """

    rows: pd.DataFrame
    heads: tuple[Head, ...]
    outcome: str
    error: float
    ci_low: float
    ci_high: float
    last_half: float
    gain_over_last_half: tuple[float, float]
    straight_line: float
    model: str = ""

    def frame(self) -> pd.DataFrame:
        """All rows: name, stack, layer, head, then the errors."""
        return self.rows.copy()

    def write_to(self, model: nn.Module) -> None:
        """Write the set as `model.generation_config.alignment_heads`, which `save` keeps.

        Whisper's `generate(return_token_timestamps=True)` and `align` read it.

        Raises:
            ArgumentError: the heads are of another model, or the set was not found.
            UnsupportedError: the model has no generation configuration.
        """
        model = check_model("AlignmentHeads.write_to", model)
        actual, config = fingerprint(model), getattr(model, "generation_config", None)
        if actual != self.model:
            raise ArgumentError(
                f"AlignmentHeads.write_to: these are heads of the model {self.model}, not of "
                f"{actual}. Give the model that they were found in."
            )
        if self.outcome != "found":
            raise ArgumentError(
                f"AlignmentHeads.write_to: the set was {self.outcome}; its mean error is "
                f"{self.error:.2f} positions, that of a straight line {self.straight_line:.2f}. "
                f"Give more examples, or some whose borders do not follow from the number of an "
                f"output; or set generation_config.alignment_heads yourself if you want it "
                f"nevertheless."
            )
        if config is None:
            raise UnsupportedError(
                f"AlignmentHeads.write_to: {type(model).__name__} has no generation_config. Give "
                f"a model that generates."
            )
        config.alignment_heads = [[head.layer, head.head] for head in self.heads]
        # Transformers drops fields of its own from files that claim to follow from the config.
        config._from_model_config = False

    def __str__(self) -> str:
        names, row = ", ".join(map(str, self.heads)), self.rows.iloc[0]
        low, high = self.gain_over_last_half
        return (
            f"{names}: {self.outcome}; mean error {self.error:.2f} positions "
            f"[{self.ci_low:.2f}, {self.ci_high:.2f}] over {counted(int(row['n']), 'output')} of "
            f"{counted(int(row['texts']), 'held-out example')}, {self.last_half:.2f} for all heads "
            f"of the last half (gain [{low:.2f}, {high:.2f}]), {self.straight_line:.2f} for a "
            f"straight line"
        )

    def __repr__(self) -> str:
        return at_prompt(f"AlignmentHeads: {self}", self.rows.sort_values("error"))

    def _repr_html_(self) -> str:
        rows = self.rows.sort_values("error")
        return rows.to_html(index=False, float_format="{:.3f}".format, escape=True)

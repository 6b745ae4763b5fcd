"""Effects of heads on a difference of logits: what each writes, and what is lost without it."""

from headwise.head_effects._effects import HeadEffects as HeadEffects
from headwise.head_effects._effects import Removal as Removal
from headwise.head_effects._effects import effects as effects
from headwise.head_effects._evidence import FEWEST_EXAMPLES as FEWEST_EXAMPLES

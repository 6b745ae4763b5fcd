"""Heads found on examples: of tasks, and those that align outputs with their source."""

from headwise.roles.examples._align import Alignment as Alignment
from headwise.roles.examples._align import align as align
from headwise.roles.examples._alignment_heads import AlignedBatch as AlignedBatch
from headwise.roles.examples._alignment_heads import find_alignment_heads as find_alignment_heads
from headwise.roles.examples._found_heads import FoundHeads as FoundHeads
from headwise.roles.examples._found_heads import load_heads as load_heads
from headwise.roles.examples._task_examples import task_examples as task_examples
from headwise.roles.examples._task_heads import find_heads as find_heads

"""The work of the commands: reading texts, opening models, calling the library, saving results.

This folder imports everything heavy, so a command imports it when it runs.
"""

from headwise.caching import save_duo_attention
from headwise.cli.tasks._cache import plan_cache
from headwise.cli.tasks._compare import compare_files, compare_models
from headwise.cli.tasks._corpus import open_job, run_job
from headwise.cli.tasks._figures import draw_differences, draw_statistics
from headwise.cli.tasks._group import group_model
from headwise.cli.tasks._heads import find_model_heads
from headwise.cli.tasks._importance import score_model
from headwise.cli.tasks._mini_gpt import SETTINGS, study_mini_gpt, train_mini_gpt
from headwise.cli.tasks._models import open_model
from headwise.cli.tasks._prune import PruneOptions, prune_model
from headwise.cli.tasks._roles import find_model_roles
from headwise.cli.tasks._study import RequestedStatistics, Shown, look_at_text, study_model
from headwise.cli.tasks._texts import draw_texts, read_text_file, read_texts_or_pairs
from headwise.jobs import merge_corpus
from headwise.report import load_study
from headwise.tables import save_figure

__all__ = [
    "SETTINGS",
    "PruneOptions",
    "RequestedStatistics",
    "Shown",
    "compare_files",
    "compare_models",
    "draw_differences",
    "draw_statistics",
    "draw_texts",
    "find_model_heads",
    "find_model_roles",
    "group_model",
    "load_study",
    "look_at_text",
    "merge_corpus",
    "open_job",
    "open_model",
    "plan_cache",
    "prune_model",
    "read_text_file",
    "read_texts_or_pairs",
    "run_job",
    "save_duo_attention",
    "save_figure",
    "score_model",
    "study_mini_gpt",
    "study_model",
    "train_mini_gpt",
]

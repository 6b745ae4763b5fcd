"""The study of a model's heads, the page that shows it, and a look at one text."""

from headwise.report._passes import observe_texts
from headwise.report._samples import Sample, TopPairs
from headwise.report._single_text import Look, look
from headwise.report._stages import About, roles_of_lab, study, study_lab
from headwise.report._study import Study, load_study
from headwise.report.comparison import Comparison, compare, compare_tables

__all__ = [
    "About",
    "Comparison",
    "Look",
    "Sample",
    "Study",
    "TopPairs",
    "compare",
    "compare_tables",
    "load_study",
    "look",
    "observe_texts",
    "roles_of_lab",
    "study",
    "study_lab",
]

"""The study of a model's heads, and the page that shows it."""

from headwise.report._stages import About, roles_of_lab, study, study_lab
from headwise.report._study import Study
from headwise.report._study_data import Sample
from headwise.report.comparison import Comparison, compare, compare_tables

__all__ = [
    "About",
    "Comparison",
    "Sample",
    "Study",
    "compare",
    "compare_tables",
    "roles_of_lab",
    "study",
    "study_lab",
]

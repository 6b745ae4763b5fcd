"""The study of a model's heads, and the page that shows it."""

from headwise.report._stages import About, roles_of_lab, study, study_lab
from headwise.report._study import Study
from headwise.report._study_data import Sample

__all__ = ["About", "Sample", "Study", "roles_of_lab", "study", "study_lab"]

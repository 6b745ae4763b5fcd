"""Saved studies: a folder with the facts as JSON and the numbers as safetensors."""

from headwise.report.saved._study_folder import read_study, write_study

__all__ = ["read_study", "write_study"]

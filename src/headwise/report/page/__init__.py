"""The page of a study: one HTML file, drawn from the study's data."""

from headwise.report.page._render import render, write_page

__all__ = ["render", "write_page"]

"""The page of a comparison: one HTML file without a script."""

from headwise.report.comparison.page._render import write_comparison_page

__all__ = ["write_comparison_page"]

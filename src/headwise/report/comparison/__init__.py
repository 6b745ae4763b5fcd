"""Two models compared head by head: what changed, by how much, and how sure that is."""

from headwise.report.comparison._compare import compare
from headwise.report.comparison._compare_tables import compare_tables
from headwise.report.comparison._comparison import Comparison

__all__ = ["Comparison", "compare", "compare_tables"]

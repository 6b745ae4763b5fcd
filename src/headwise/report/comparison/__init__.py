"""Two models compared head by head: what changed, by how much, and how sure that is."""

from headwise.report.comparison._compare import compare as compare
from headwise.report.comparison._compare_tables import compare_tables as compare_tables
from headwise.report.comparison._comparison import Comparison as Comparison

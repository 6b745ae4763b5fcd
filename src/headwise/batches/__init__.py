"""Large corpora: a batch of texts becomes one row of bytes, and rows add up in any order."""

from headwise.batches._batches import BatchImportance, BatchObserver
from headwise.batches._files import observe_files, read_rows

__all__ = ["BatchImportance", "BatchObserver", "observe_files", "read_rows"]

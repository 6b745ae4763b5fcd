"""Large corpora: a batch of texts becomes one row of bytes, and rows add up in any order."""

from headwise.batches._batches import BatchImportance as BatchImportance
from headwise.batches._batches import BatchObserver as BatchObserver
from headwise.batches._files import observe_files as observe_files
from headwise.batches._files import read_rows as read_rows

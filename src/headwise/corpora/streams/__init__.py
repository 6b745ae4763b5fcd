"""Corpora larger than memory: files and datasets that are read as shards, text by text."""

from headwise.corpora.streams._datasets import DatasetStream
from headwise.corpora.streams._file_corpus import DataFile, FileCorpus
from headwise.corpora.streams._source import CorpusSource, open_source
from headwise.corpora.streams._windows import windows

__all__ = ["CorpusSource", "DataFile", "DatasetStream", "FileCorpus", "open_source", "windows"]

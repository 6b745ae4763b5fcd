"""Atomic writes of files and folders, and a strict reader of JSON."""

from headwise.files._atomic import files_beside, folder_beside, write_beside
from headwise.files._claim import claim
from headwise.files._json import build_from, parse_json, read_json, read_object, write_json
from headwise.files._scratch import sweep

__all__ = [
    "build_from",
    "claim",
    "files_beside",
    "folder_beside",
    "parse_json",
    "read_json",
    "read_object",
    "sweep",
    "write_beside",
    "write_json",
]

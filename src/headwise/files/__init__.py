"""Atomic writes of files and folders, and a strict reader of JSON."""

from headwise.files._atomic import (
    STUDY_FILES,
    as_path,
    check_writable,
    file_of_others,
    files_beside,
    folder_beside,
    make_folder,
    write_beside,
)
from headwise.files._json import (
    JsonFile,
    build_from,
    number,
    parse_json,
    read_json,
    read_object,
    typed,
    without_nan,
    write_json,
)
from headwise.files._text import decode, is_unicode, kind_of

__all__ = [
    "STUDY_FILES",
    "JsonFile",
    "as_path",
    "build_from",
    "check_writable",
    "decode",
    "file_of_others",
    "files_beside",
    "folder_beside",
    "is_unicode",
    "kind_of",
    "make_folder",
    "number",
    "parse_json",
    "read_json",
    "read_object",
    "typed",
    "without_nan",
    "write_beside",
    "write_json",
]

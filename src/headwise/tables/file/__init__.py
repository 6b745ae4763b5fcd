"""Files of tables: Parquet, CSV and JSON with metadata, and limits on what is read."""

from headwise.tables.file._table_file import (
    check_ending,
    heads_of_rows,
    indices_of,
    numbers_of,
    originals_of_rows,
    read_saved,
    texts_of,
    write_table_file,
)

__all__ = [
    "check_ending",
    "heads_of_rows",
    "indices_of",
    "numbers_of",
    "originals_of_rows",
    "read_saved",
    "texts_of",
    "write_table_file",
]

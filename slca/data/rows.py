"""Files of rows: JSON Lines line by line, a .json list, parquet (extra "parquet"); and the errors that name a place.

JSON Lines and parquet are streams: memory does not grow with the file. A .json list is read whole. What a row means is
the business of `parts.py`, `toucan.py` and `sets.py`. Left out: compressed files, and downloading.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".json", ".parquet")
CATALOGUES = {"seal_tools": "tool.jsonl", "api_bank": "tools.json"}  # kind -> the tool schemas beside its rows
DROPPED = "dropped.jsonl"  # a list of rows that could not be used; its name ends so
MISSING = object()


class DataError(ValueError):
    """A file or row that cannot be used."""

    def __init__(self, file: Any, row: int | None, field: str, expected: str, found: Any = MISSING):
        """row: line of a JSONL file, else position from 1; None for the file as a whole."""
        self.file, self.row, self.field, self.expected = str(file), row, field, expected
        place = ", ".join(str(part) for part in (file, row and f"row {row}", field) if part)
        shown = repr(found) if len(repr(found)) <= 80 else f"{found!r:.77}..."
        super().__init__(f"{place}: expected {expected}" + ("" if found is MISSING else f", found {shown}"))


class BadRow(Exception):
    """A problem inside a row; the file and row number are added where they are known."""

    def __init__(self, field: str, expected: str, found: Any = MISSING):
        super().__init__(field, expected, found)


def data_files(path: str | Path) -> list[Path]:
    """The file itself; of a folder its data files by name, without catalogues of tools and lists of dropped rows."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES and p.name not in CATALOGUES.values()
                   and not p.name.endswith(DROPPED) and not p.name.startswith("."))
    if not files:
        raise DataError(path, None, "", f"a folder with {SUFFIXES[0]}, {SUFFIXES[1]} or {SUFFIXES[2]} files")
    return files


def read_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(row number, row) of a file, chosen by its suffix; blank lines of JSONL are passed over. Raises DataError.

    A line that is not JSON is given as a BadRow, so that the caller decides about it as about any other bad row.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(path, None, "", "a file or folder that exists")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".jsonl":
        with path.open("rb") as lines:  # bytes: text mode would take a lone carriage return for the end of a row
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _line(line)
    elif path.suffix == ".json":
        row = _line(path.read_bytes())
        if isinstance(row, BadRow):
            raise DataError(path, None, *row.args) from row
        if not isinstance(row, list):
            raise DataError(path, None, "", "a JSON list of rows", row)
        yield from enumerate(row, 1)
    else:
        raise DataError(path, None, "", "a name that ends in .jsonl, .json or .parquet")


def decoded(value: Any, field: str) -> Any:
    """The value, decoded if it is JSON text (released files hold nested values so). Raises BadRow."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        raise BadRow(field, f"JSON ({error})", value) from error


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _line(data: bytes) -> Any:
    try:
        return decoded(data.decode("utf-8-sig"), "")
    except UnicodeDecodeError as error:
        return BadRow("", f"UTF-8 text ({error})")
    except BadRow as bad:
        return bad


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(path, None, "", 'pyarrow, to read parquet: pip install -e ".[parquet]"') from error
    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield number, _unpad(row, False)
    except (OSError, ValueError) as error:
        raise DataError(path, None, "", f"a parquet file ({error})") from error


def _unpad(value: Any, in_list: bool) -> Any:
    """Without the nulls that parquet adds to structs in lists: all of them have the union of their keys."""
    if isinstance(value, dict):
        return {k: _unpad(v, in_list) for k, v in value.items() if v is not None or not in_list}
    return [_unpad(item, True) for item in value] if isinstance(value, list) else value

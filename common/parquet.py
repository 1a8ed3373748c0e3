"""Parquet in terms of JSON lines: a row is an object with the columns as its keys."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.errors import ConfigError, first_line

MAGIC = b"PAR1"


def read_as_lines(stream: BinaryIO, name: str) -> bytes:
    """Return the rows of a Parquet file as JSON lines, without what is null. Raises ConfigError."""
    require_pyarrow(name)
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(stream)
        columns = file.schema_arrow.names
        batches = list(file.iter_batches())
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{name}: no whole Parquet file ({first_line(error)}); write it again") from None
    twice = next((column for column in columns if columns.count(column) > 1), None)
    if twice is not None:
        raise ConfigError(f"{name}: the column {twice!r:.60} stands there twice: leave one of them out")
    try:
        return b"".join(_line(row) for batch in batches for row in batch.to_pylist())
    except (ArrowException, ArithmeticError, LookupError, ValueError) as error:
        raise ConfigError(
            f"{name}: a value, such as a date or a text, cannot be read ({first_line(error)}); leave its column out"
        ) from None


def columns_of(path: Path) -> set[str]:
    """Return the columns of a Parquet file; none of another file."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    try:
        return set(read_schema(path).names)
    except (ArrowException, OSError):
        return set()


def as_parquet(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a Parquet file with a row a record, in their order.

    A column whose values are objects, or of several kinds, holds them as JSON.
    """
    import pyarrow
    from pyarrow.parquet import write_table

    names = list(dict.fromkeys(name for record in records for name in record))
    columns = [_column([record.get(name) for record in records]) for name in names]
    content = io.BytesIO()
    write_table(pyarrow.table(dict(zip(names, columns, strict=True))), content)
    return content.getvalue()


def plain(value: Any) -> Any:
    """Return a value of a column as JSON has it. What Arrow adds where rows differ in their fields is left out."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return None  # as a missing text comes out of a column of texts
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: item for name, one in value.items() if (item := plain(one)) is not None}
    return value


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(plain(row), ensure_ascii=False, default=_text).encode(errors="backslashreplace") + b"\n"


def _text(value: Any) -> str | None:
    """What is neither a number nor a text, such as a date. Bytes that are no text, such as a picture, are null."""
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        return None


def _column(values: Sequence[Any]) -> Any:
    import pyarrow

    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1 and dict not in kinds:
        try:
            return pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError, UnicodeError):
            pass  # lists of several kinds, more than 64 bits, or a text that is no Unicode
    return pyarrow.array([None if value is None else json.dumps(value) for value in values])


def require_pyarrow(name: str) -> None:
    """Raise ConfigError where it is not installed. name: of the file that needs it."""
    if find_spec("pyarrow") is None:
        raise ConfigError(f"{name}: Parquet needs pyarrow: pip install -e '.[parquet]', or take JSON lines")

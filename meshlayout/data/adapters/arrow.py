"""Columns of Arrow tables as NumPy arrays with one row per example."""

from typing import Any

from meshlayout.errors import DataError


def columns(table: Any) -> dict[str, Any]:
    """Returns the columns of a table by name, each a tree of arrays.

    Args:
        table: An Arrow table.

    Raises:
        DataError: If rows are missing, or have different lengths.
    """
    return {
        name: _column(table.column(name).combine_chunks(), name)
        for name in table.column_names
    }


def _column(column: Any, path: str) -> Any:
    """Returns a column of a table as an array with one row per example.

    Raises:
        DataError: If rows are missing, or have different lengths.
    """
    kind = str(column.type)
    if column.null_count:
        msg = (
            f"{path}: {column.null_count} of the rows asked for are None. Fill them "
            "in, or leave them out, with the data set's map or filter."
        )
        raise DataError(msg)
    if hasattr(column, "storage"):
        return _column(column.storage, path)
    if kind.startswith("struct"):
        fields = [column.type.field(i).name for i in range(column.type.num_fields)]
        return {name: _column(column.field(name), f"{path}/{name}") for name in fields}
    if hasattr(column, "flatten") and hasattr(column, "value_lengths"):
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if len(set(lengths.tolist())) > 1:
            msg = (
                f"{path}: rows have different lengths, {lengths.min()} and "
                f"{lengths.max()}. Pad or crop them to one with the data set's map."
            )
            raise DataError(msg)
        inner = _column(column.flatten(), path)
        return inner.reshape(len(column), -1, *inner.shape[1:])
    return column.to_numpy(zero_copy_only=False)

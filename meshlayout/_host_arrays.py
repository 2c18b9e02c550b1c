"""Host arrays on their way to devices: one entry point for all that users pass.

NumPy has arrays that JAX lacks: in the other byte order (as in IDX and FITS files),
masked, of 64 bits, of objects. Fast ways to place shards swap bytes and lose masks.
"""

from typing import Any

import jax
import numpy as np

from meshlayout import _jax
from meshlayout._checks import shown
from meshlayout.errors import LayoutError, MeshLayoutError


def plain_array(
    value: Any,
    where: object = "the array",
    *,
    error: type[MeshLayoutError] = LayoutError,
) -> np.ndarray[Any, Any]:
    """Returns a value as a NumPy array in this machine's byte order, without a mask.

    Nothing is copied if it is one already. Any dtype is allowed, even strings.
    """
    nodes = jax.tree.leaves(value, is_leaf=lambda x: not isinstance(x, (list, tuple)))
    if any(isinstance(node, np.ma.MaskedArray) for node in nodes):
        msg = f"{where} is a masked array, and JAX would lose its mask. Fill it with"
        raise error(f"{msg} x.filled(value), and pass the mask on its own if needed.")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as problem:
        reason = str(problem).partition("\n")[0]
        msg = f"{where}: {shown(value)} cannot be converted to an array: {reason}"
        raise error(msg) from None
    if array.dtype == object and hasattr(value, "columns") and hasattr(value, "items"):
        array = _of_columns(value, array, where, error)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _of_columns(
    frame: Any, array: np.ndarray[Any, Any], where: object, error: type[MeshLayoutError]
) -> np.ndarray[Any, Any]:
    """Returns a data frame of several dtypes, which NumPy makes objects, as numbers."""
    columns = [(name, x.dtype, np.asarray(x)) for name, x in frame.items()]
    others = [f"{n!r} ({kind})" for n, kind, x in columns if x.dtype.kind not in "biuf"]
    if others and len(others) < len(columns):
        fact = f"{where}: no numbers are in the columns {', '.join(others)}. Leave them"
        way = "of numbers pd.to_numeric(frame[name]), of dates (frame[name] - "
        way += "frame[name].min()).dt.days, of text pd.get_dummies(frame)."
        raise error(f"{fact} out, or write {way}")
    return array if others else np.column_stack([x for *_, x in columns])


def host_array(value: Any, where: object = "the array") -> np.ndarray[Any, Any]:
    """Returns a value as a NumPy array that a device can hold with the same values.

    Integers that do not fit into 32 bits are refused; floats are narrowed, as in JAX.
    """
    if _jax.is_plain(value):
        return value
    array = plain_array(value, where)
    if not _jax.is_array_dtype(array.dtype):
        raise LayoutError(f"{where}: {shown(value)} is not an array of numbers.")
    dtype = _jax.canonical_dtype(array.dtype)
    if dtype == array.dtype or array.dtype.kind not in "iu" or not array.size:
        return array
    low, high = int(array.min()), int(array.max())
    limits = np.iinfo(dtype)
    if low < limits.min or high > limits.max:
        msg = f"{where} holds {high if high > limits.max else low}, and JAX would turn"
        hint = "Set jax_enable_x64, or give it another dtype."
        raise LayoutError(f"{msg} {array.dtype} into {dtype}. {hint}")
    return array

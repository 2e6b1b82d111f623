"""Arrays of a driver, numpy's or torch's, on their way to the ranks and back. Torch is used only where it is loaded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from commbench.errors import CollectiveError, UsageError
from commbench.types import DTYPES

# what can travel; what a collective takes is for its backend to say
DTYPES_SENT = frozenset({*DTYPES, "int16", "bool", "complex64", "complex128", "uint16", "uint32", "uint64"})


@dataclass(frozen=True, slots=True)
class Packed:
    """An array on its way: what it is, its bytes, and one like it for the way back."""

    spec: dict[str, Any]
    data: Any
    like: Any

    def rebuilt(self, spec: dict[str, Any], data: bytes) -> Any:
        """A result, as numpy or torch, whichever was given."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(self.like, torch.Tensor):
            dtype = getattr(torch, spec["dtype"])
            flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
            return flat.reshape(spec["shape"]).to(self.like.device)
        import numpy as np

        return np.frombuffer(data, dtype=np.dtype(spec["dtype"])).reshape(spec["shape"]).copy()


def one_per_rank(what: str, array: Any, ranks: int, *, same_rows: bool) -> list[Packed]:
    """Raises UsageError for what is no array, CollectiveError for a wrong number of them or unlike ones."""
    if isinstance(array, list | tuple):
        if len(array) != ranks:
            raise CollectiveError(f"{what}: {len(array)} arrays were given, one is needed for each of {ranks} ranks")
        arrays = [_packed(f"{what}: item {i}", item) for i, item in enumerate(array)]
    else:
        arrays = [_packed(what, array)] * ranks
    first = arrays[0].spec
    for i, other in enumerate(arrays):
        skipped = 0 if same_rows else 1
        alike = first["shape"][skipped:] == other.spec["shape"][skipped:]
        if first["dtype"] != other.spec["dtype"] or not alike:
            raise CollectiveError(
                f"{what}: rank {i} has {other.spec['dtype']} {tuple(other.spec['shape'])}, "
                f"rank 0 {first['dtype']} {tuple(first['shape'])}"
            )
    return arrays


def _packed(what: str, array: Any) -> Packed:
    import numpy as np

    torch = sys.modules.get("torch")  # who holds a tensor has imported it
    if torch is not None and isinstance(array, torch.Tensor):
        dtype = str(array.dtype).removeprefix("torch.")
        if array.layout is not torch.strided or dtype not in DTYPES_SENT:
            raise UsageError(f"{what}: a tensor of {dtype} with layout {array.layout} cannot be sent to the ranks")
        dense = array.detach().cpu().contiguous().reshape(-1)
        data = memoryview(dense.view(torch.uint8).numpy()) if dense.numel() else b""
        return Packed({"dtype": dtype, "shape": list(array.shape)}, data, array)
    if not isinstance(array, np.ndarray | np.generic):
        hint = "; a list is one array per rank" if isinstance(array, list | tuple | int | float) else ""
        raise UsageError(f"{what}: {type(array).__name__} {array!r:.60} is no numpy array or torch tensor{hint}")
    if array.dtype.name not in DTYPES_SENT:
        raise UsageError(f"{what}: an array of dtype {array.dtype} cannot be sent; give numbers of one size")
    native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    data = native.reshape(-1).view(np.uint8).data if native.size else b""
    return Packed({"dtype": array.dtype.name, "shape": list(array.shape)}, data, native)

"""Collectives of an engine on real data, for trying things out: arrays travel to the ranks, and results back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commbench.errors import UsageError, unknown
from commbench.harness.engine.arrays import one_per_rank
from commbench.harness.engine.calls import Message, PartOfEngine
from commbench.harness.engine.plan import policy_files
from commbench.types import OPS

_GROUPS = ("world", "tp", "pp", "moe_ep", "moe_tp")
_HOW = ("group", "backend", "policy")  # what every collective can be told

Arrays = Any  # a numpy array or torch tensor, or a list of one per rank


class Collectives(PartOfEngine):
    """The collectives that ``Engine`` has as methods."""

    def all_reduce(self, array: Arrays, op: str = "sum", **how: Any) -> list[Any]:
        """The reduction over ranks, on every rank.

        This and the methods below take one array for all ranks or a list of one per rank (numpy arrays or torch
        tensors, the same shapes and dtypes), and give a list with each rank's result, as what was given.
        Further keywords: ``group`` (world, tp, pp, moe_ep or moe_tp; all groups of the kind work at once), ``backend``
        (a name to force) and ``policy``. Raises UsageError for what is no array, CollectiveError (and
        BackendUnavailable) where the collective cannot take it.
        """
        return self._collective("all_reduce", array, how, op=op)

    def reduce(self, array: Arrays, dst: int = 0, op: str = "sum", **how: Any) -> list[Any]:
        """The reduction, on rank dst of the group; None elsewhere."""
        return self._collective("reduce", array, how, dst=dst, op=op)

    def all_gather(self, array: Arrays, dim: int = 0, **how: Any) -> list[Any]:
        """All ranks' arrays along a dimension, on every rank."""
        return self._collective("all_gather", array, how, dim=dim)

    def all_gatherv(self, arrays: Sequence[Any], **how: Any) -> list[Any]:
        """As all_gather along the first dimension, of which each rank may have another number of rows."""
        return self._collective("all_gatherv", arrays, how)

    def reduce_scatter(self, array: Arrays, op: str = "sum", **how: Any) -> list[Any]:
        """Each rank's part (along the first dimension) of the reduction."""
        return self._collective("reduce_scatter", array, how, op=op)

    def broadcast(self, array: Arrays, src: int = 0, **how: Any) -> list[Any]:
        """Rank src's array, on every rank."""
        return self._collective("broadcast", array, how, src=src)

    def all_to_all(self, array: Arrays, **how: Any) -> list[Any]:
        """Part i (along the first dimension) of every rank's array, one after the other, on rank i."""
        return self._collective("all_to_all", array, how)

    def gather(self, array: Arrays, dst: int = 0, dim: int = 0, **how: Any) -> list[Any]:
        """All ranks' arrays along a dimension, on rank dst of the group; None elsewhere."""
        return self._collective("gather", array, how, dst=dst, dim=dim)

    def scatter(self, array: Arrays, src: int = 0, **how: Any) -> list[Any]:
        """Part i (along the first dimension) of rank src's array, on rank i."""
        return self._collective("scatter", array, how, src=src)

    def send_recv(self, array: Arrays, **how: Any) -> list[Any]:
        """Around the ring: the array of the rank before."""
        return self._collective("send_recv", array, how)

    def barrier(self, **how: Any) -> None:
        """All ranks meet."""
        self._collective("barrier", None, how)

    def _collective(self, name: str, array: Any, how: Mapping[str, Any], **details: Any) -> list[Any]:
        """how: keywords that every collective has. details: those that this one has beside."""
        message = _message(name, how, details)
        if array is None and name == "barrier":
            self._calls.run("barrier", [message] * self.ranks)
            return []
        arrays = one_per_rank(name, array, self.ranks, same_rows=name != "all_gatherv")
        if name == "all_gatherv":
            message["sizes"] = [a.spec["shape"][0] if a.spec["shape"] else 0 for a in arrays]
        replies = self._calls.run(
            name,
            [{**message, "arrays": [a.spec]} for a in arrays],
            buffers=[[a.data] for a in arrays],
        )
        return [
            like.rebuilt(reply["arrays"][0], data[0]) if data else None
            for like, (reply, data) in zip(arrays, replies, strict=True)
        ]


def _message(name: str, how: Mapping[str, Any], details: Mapping[str, Any]) -> Message:
    """The command of one collective. Raises UsageError, UnknownName or PolicyError for what it cannot be told."""
    from commbench.registry import BACKENDS

    for key in how:
        if key not in _HOW:
            raise UsageError(f"{name}: there is no keyword {key!r}; it takes {', '.join([*details, *_HOW])}")
    group, backend, policy = how.get("group", "world"), how.get("backend"), how.get("policy")
    if group not in _GROUPS:
        raise unknown("group", str(group), _GROUPS)
    if backend is not None and backend not in BACKENDS:
        raise unknown("backend", str(backend), BACKENDS)
    if policy is not None and not isinstance(policy, str):
        raise UsageError(f"{name}: policy={policy!r} is no name of a policy; a file is named by its path, as text")
    if details.get("op", "sum") not in OPS:
        raise unknown("op", str(details["op"]), OPS)
    for key in ("src", "dst", "dim"):
        if key in details and (isinstance(details[key], bool) or not isinstance(details[key], int)):
            raise UsageError(f"{name}: {key}={details[key]!r} is no whole number")
    return {
        "command": "collective", "collective": name, "group": group, "backend": backend, "policy": policy,
        "policies": policy_files([] if policy is None else [policy]), **details,
    }  # fmt: skip

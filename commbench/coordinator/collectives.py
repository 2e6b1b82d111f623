"""The tensor collectives of a group.

Each builds its key from what a policy may look at, and takes the route that is remembered under it; arguments are
checked when a key is new. Ranks in arguments (``src``, ``dst``) are ranks in the group. What every rank must pass
alike is not compared unless the group checks calls: with different shapes or dtypes gloo and NCCL raise, hang until
the timeout or give wrong data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from commbench.coordinator import custom_ops  # noqa: F401 - registers torch.ops.commbench
from commbench.coordinator.p2p import as_bytes
from commbench.coordinator.routing import DTYPE_NAMES, Router
from commbench.errors import CollectiveError
from commbench.types import OPS

Facts = tuple[torch.dtype, int, bool]


class TensorCollectives(Router):
    """See the module's text. Every method raises CollectiveError for arguments that do not fit, after ``destroy``
    and when the backend fails, and BackendUnavailable when a forced backend cannot take the call."""

    unique_name: str

    # ---- reductions -----------------------------------------------------------------------------------

    def all_reduce(self, input: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
        """Reduce over all ranks. input: any shape; out: the same shape and dtype, or None for in place.

        Gives the tensor that holds the result.
        """
        if is_dynamo_compiling():
            return self._traced_all_reduce(input, op, out)
        if out is None or out is input:
            out = input
            key: tuple[Any, ...] = ("all_reduce", op, input.dtype, input.numel(), input.is_contiguous(), self._mode)
        else:  # a look at a tensor costs more than the rest of this together
            key = (
                "all_reduce", op, input.dtype, input.numel(), input.is_contiguous(), self._mode,
                out.dtype, out.numel(), out.is_contiguous(),
            )  # fmt: skip
        route = self._routes.get(key)
        if route is None:
            self._check_like("all_reduce", input, out, 1, 1)
            route = self._decided(key, "all_reduce", input, op, _placement(out is input), (input.numel(),))
        try:
            route.method(input, out, op)
        except RuntimeError as error:
            raise self._failed("all_reduce", error) from error
        return out

    def _traced_all_reduce(self, input: torch.Tensor, op: str, out: torch.Tensor | None) -> torch.Tensor:
        if op not in OPS:
            raise CollectiveError(f"all_reduce: op {op!r} is not one of {', '.join(OPS)}")
        method = self._forced or ""
        if out is None or out is input:
            torch.ops.commbench.all_reduce_(input, self.unique_name, OPS.index(op), method)
            return input
        out.copy_(torch.ops.commbench.all_reduce(input, self.unique_name, OPS.index(op), method))
        return out

    def reduce(
        self, input: torch.Tensor, dst: int = 0, op: str = "sum", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """On rank dst: out (or input, in place) = the reduction. Elsewhere its content is undefined."""
        if out is None:
            out = input
        key = (
            "reduce", op, input.dtype, input.numel(), input.is_contiguous(),
            None if out is input else _facts(out), dst, self._mode,
        )  # fmt: skip
        route = self._routes.get(key)
        if route is None:
            self._check_rank("reduce", "dst", dst)
            self._check_like("reduce", input, out, 1, 1)
            route = self._decided(key, "reduce", input, op, _placement(out is input), (input.numel(), dst))
        try:
            route.method(input, out, dst, op)
        except RuntimeError as error:
            raise self._failed("reduce", error) from error
        return out

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """output = this rank's 1/world_size of the reduction of every rank's input, split along the first dimension.

        input: world_size × output's elements. Gives output.
        """
        if is_dynamo_compiling():
            if op not in OPS:
                raise CollectiveError(f"reduce_scatter: op {op!r} is not one of {', '.join(OPS)}")
            torch.ops.commbench.reduce_scatter_tensor(
                output, input, self.unique_name, OPS.index(op), self._forced or ""
            )
            return output
        in_place = _inside(output, input)
        key = (
            "reduce_scatter", op, input.dtype, input.numel(), input.is_contiguous(), in_place,
            output.dtype, output.numel(), output.is_contiguous(), self._mode,
        )  # fmt: skip
        route = self._routes.get(key)
        if route is None:
            self._check_like("reduce_scatter", input, output, self.world_size, 1)
            route = self._decided(key, "reduce_scatter", input, op, _placement(in_place), (input.numel(),))
        try:
            route.method(input, output, op)
        except RuntimeError as error:
            raise self._failed("reduce_scatter", error) from error
        return output

    def reduce_scatter(self, output: torch.Tensor, input_list: Sequence[torch.Tensor], op: str = "sum") -> torch.Tensor:
        """output = the reduction over ranks of their input_list[rank_in_group].

        input_list: world_size tensors of one dtype, the same shapes on every rank; they may differ among themselves
        (then it runs as ``reduce_scatterv``). output has the shape of this rank's entry. Gives output.
        """
        if len(input_list) != self.world_size:
            raise CollectiveError(
                f"reduce_scatter: {len(input_list)} tensors given, one is needed for each of {self.world_size} ranks"
            )
        mine = input_list[self.rank_in_group]
        if output.shape != mine.shape:
            raise CollectiveError(
                f"reduce_scatter: output has shape {tuple(output.shape)}, this rank's input {tuple(mine.shape)}"
            )
        for i, part in enumerate(input_list):
            if part.dtype != output.dtype:
                raise CollectiveError(f"reduce_scatter: input_list[{i}] is {part.dtype} but output is {output.dtype}")
        whole = torch.cat([part.reshape(-1) for part in input_list])
        sizes = [part.numel() for part in input_list]
        flat = output.view(-1) if output.is_contiguous() else output.new_empty(output.numel())
        if len(set(sizes)) == 1:
            self.reduce_scatter_tensor(flat, whole, op)
        else:
            self.reduce_scatterv(whole, flat, sizes, op)
        if not output.is_contiguous():
            output.copy_(flat.view(output.shape))
        return output

    def reduce_scatterv(
        self,
        input: torch.Tensor,
        output: torch.Tensor | None = None,
        sizes: Sequence[int] | None = None,
        op: str = "sum",
    ) -> torch.Tensor:
        """This rank's rows of the reduction of every rank's input.

        input: (sum(sizes), ...) on every rank; rank i gets sizes[i] rows. sizes None: equal parts. output: this rank's
        rows, or None for a new tensor. Gives output. sizes must be the same on all ranks.
        """
        if input.dim() == 0:
            raise CollectiveError("reduce_scatterv: input has no dimension to split")
        rows = self._rows("reduce_scatterv", sizes, input.shape[0])
        shape = (rows[self.rank_in_group], *input.shape[1:])
        if output is None:
            output = input.new_empty(shape)
        elif output.shape != shape or output.dtype != input.dtype:
            raise CollectiveError(
                f"reduce_scatterv: output is {tuple(output.shape)} {output.dtype}, "
                f"this rank's part is {shape} {input.dtype}"
            )
        if len(set(rows)) == 1:
            return self.reduce_scatter_tensor(output, input, op)
        key = (
            "reduce_scatterv", op, rows, input.dtype, input.numel(), input.is_contiguous(), output.is_contiguous(),
            self._mode,
        )  # fmt: skip
        route = self._routes.get(key)
        if route is None:
            route = self._decided(key, "reduce_scatterv", input, op, "out", (rows, input.numel()))
        try:
            route.method(input, output, list(rows), op)
        except RuntimeError as error:
            raise self._failed("reduce_scatterv", error) from error
        return output

    # ---- gathers ---------------------------------------------------------------------------------------

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """output (world_size × input's elements) = every rank's input in rank order. Gives output."""
        if is_dynamo_compiling():
            torch.ops.commbench.all_gather_into_tensor(output, input, self.unique_name, self._forced or "")
            return output
        in_place = _inside(input, output)
        key = (
            "all_gather", input.dtype, input.numel(), input.is_contiguous(), in_place,
            output.dtype, output.numel(), output.is_contiguous(), self._mode,
        )  # fmt: skip
        route = self._routes.get(key)
        if route is None:
            self._check_like("all_gather", input, output, 1, self.world_size)
            if input.dtype not in DTYPE_NAMES:
                self.all_gather_into_tensor(as_bytes(output), as_bytes(input.contiguous()))
                return output
            route = self._decided(key, "all_gather", input, "", _placement(in_place), (input.numel(),))
        try:
            route.method(input, output)
        except RuntimeError as error:
            raise self._failed("all_gather", error) from error
        return output

    def all_gather(
        self, input: torch.Tensor, dim: int = -1, output_tensor_list: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor | None:
        """Every rank's input, concatenated along dim (may be negative). input: the same shape on every rank.

        With output_tensor_list (world_size tensors of input's shape and dtype) each rank's input goes into its entry,
        and the result is None. A group of one gives input itself.
        """
        if output_tensor_list is not None:
            self._gather_into_list(input, output_tensor_list)
            return None
        dim = self._dim("all_gather", input, dim)
        if self.world_size == 1:
            self._check_usable("all_gather")
            return input
        shape = input.shape
        gathered = torch.empty((self.world_size, *shape), dtype=input.dtype, device=input.device)
        self.all_gather_into_tensor(gathered, input)
        return self._along(gathered, shape, dim)

    def _gather_into_list(self, input: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        if len(outputs) != self.world_size:
            raise CollectiveError(
                f"all_gather: {len(outputs)} outputs given, one is needed for each of {self.world_size} ranks"
            )
        for i, output in enumerate(outputs):
            if output.shape != input.shape or output.dtype != input.dtype:
                raise CollectiveError(
                    f"all_gather: output_tensor_list[{i}] is {tuple(output.shape)} {output.dtype}, "
                    f"input is {tuple(input.shape)} {input.dtype}"
                )
        gathered = torch.empty((self.world_size, *input.shape), dtype=input.dtype, device=input.device)
        self.all_gather_into_tensor(gathered, input)
        for output, part in zip(outputs, gathered, strict=True):
            output.copy_(part)

    def all_gatherv(
        self,
        input: torch.Tensor | Sequence[torch.Tensor],
        sizes: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Every rank's rows, one after the other: (sum(sizes), ...). Rank i gives sizes[i] rows.

        sizes None: as many as this rank's on every rank; it must be the same on all ranks. A list of tensors (all with
        these sizes) gives a list. out: where a single result goes, or None for a new tensor.
        """
        if not isinstance(input, torch.Tensor):
            if out is not None:
                raise CollectiveError("all_gatherv: out is for a single tensor, input is a list")
            return [self._all_gatherv(x, sizes, None) for x in input]
        return self._all_gatherv(input, sizes, out)

    def _all_gatherv(self, input: torch.Tensor, sizes: Sequence[int] | None, out: torch.Tensor | None) -> torch.Tensor:
        if input.dim() == 0:
            raise CollectiveError("all_gatherv: input has no dimension to gather along")
        own = input.shape[0]
        rows = self._rows("all_gatherv", [own] * self.world_size if sizes is None else sizes, None)
        if rows[self.rank_in_group] != own:
            raise CollectiveError(
                f"all_gatherv: input has {own} rows, sizes says {rows[self.rank_in_group]} "
                f"for rank {self.rank_in_group}"
            )
        shape = (sum(rows), *input.shape[1:])
        if out is None:
            out = input.new_empty(shape)
        elif out.shape != shape or out.dtype != input.dtype:
            raise CollectiveError(
                f"all_gatherv: out is {tuple(out.shape)} {out.dtype}, the result is {shape} {input.dtype}"
            )
        if len(set(rows)) == 1:
            return self.all_gather_into_tensor(out, input)
        key = (
            "all_gatherv", rows, input.dtype, input.numel(), input.is_contiguous(), out.is_contiguous(), self._mode
        )  # fmt: skip
        route = self._routes.get(key)
        if route is None:
            if input.dtype not in DTYPE_NAMES:
                row = input[:1].numel() * input.element_size() if own else out[:1].numel() * out.element_size()
                self._all_gatherv(as_bytes(input.contiguous()), [n * row for n in rows], as_bytes(out))
                return out
            route = self._decided(key, "all_gatherv", input, "", "out", (rows, out.numel()))
        try:
            route.method(input, out, list(rows))
        except RuntimeError as error:
            raise self._failed("all_gatherv", error) from error
        return out

    def gather_into_tensor(self, output: torch.Tensor | None, input: torch.Tensor, dst: int = 0) -> torch.Tensor | None:
        """On rank dst: output (world_size × input's elements) = the inputs in rank order. None elsewhere."""
        key = (
            "gather", input.dtype, input.numel(), input.is_contiguous(), None if output is None else _facts(output),
            dst, self._mode,
        )  # fmt: skip
        route = self._routes.get(key)
        if route is None:
            self._check_rank("gather", "dst", dst)
            self._check_root("gather", "output", output, dst)
            if output is not None:
                self._check_like("gather", input, output, 1, self.world_size)
            if input.dtype not in DTYPE_NAMES:
                self.gather_into_tensor(None if output is None else as_bytes(output), as_bytes(input.contiguous()), dst)
                return output
            route = self._decided(key, "gather", input, "", "out", (input.numel(), dst))
        try:
            route.method(input, output, dst)
        except RuntimeError as error:
            raise self._failed("gather", error) from error
        return output

    def gather(self, input: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """On rank dst: every rank's input, concatenated along dim; None elsewhere. Alone: input itself."""
        self._check_rank("gather", "dst", dst)
        dim = self._dim("gather", input, dim)
        if self.world_size == 1:
            self._check_usable("gather")
            return input
        if self.rank_in_group != dst:
            return self.gather_into_tensor(None, input, dst)
        gathered = torch.empty((self.world_size, *input.shape), dtype=input.dtype, device=input.device)
        self.gather_into_tensor(gathered, input, dst)
        return self._along(gathered, input.shape, dim)

    # ---- from one, to one, to all -------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """tensor = rank src's tensor, in place. Gives tensor."""
        if is_dynamo_compiling():
            torch.ops.commbench.broadcast_(tensor, self.unique_name, src, self._forced or "")
            return tensor
        key = ("broadcast", tensor.dtype, tensor.numel(), tensor.is_contiguous(), src, self._mode)
        route = self._routes.get(key)
        if route is None:
            self._check_rank("broadcast", "src", src)
            if tensor.dtype not in DTYPE_NAMES and tensor.is_contiguous():
                self.broadcast(as_bytes(tensor), src)
                return tensor
            route = self._decided(key, "broadcast", tensor, "", "in", (tensor.numel(), src))
        try:
            route.method(tensor, src)
        except RuntimeError as error:
            raise self._failed("broadcast", error) from error
        return tensor

    def scatter(self, input: torch.Tensor | None, output: torch.Tensor, src: int = 0) -> torch.Tensor:
        """output = this rank's part of rank src's input (world_size × output's elements); input None elsewhere."""
        key = ("scatter", *_facts(output), None if input is None else _facts(input), src, self._mode)
        route = self._routes.get(key)
        if route is None:
            self._check_rank("scatter", "src", src)
            self._check_root("scatter", "input", input, src)
            if input is not None:
                self._check_like("scatter", input, output, self.world_size, 1)
            route = self._decided(key, "scatter", output, "", "out", (output.numel(), src))
        try:
            route.method(input, output, src)
        except RuntimeError as error:
            raise self._failed("scatter", error) from error
        return output

    def all_to_all(self, input: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Part i of output = this rank's part of rank i's input; both of one size, in world_size equal parts."""
        if is_dynamo_compiling():
            torch.ops.commbench.all_to_all(output, input, self.unique_name, self._forced or "")
            return output
        key = (
            "all_to_all", input.dtype, input.numel(), input.is_contiguous(),
            output.dtype, output.numel(), output.is_contiguous(), self._mode,
        )  # fmt: skip
        route = self._routes.get(key)
        if route is None:
            self._check_like("all_to_all", input, output, 1, 1)
            if input.numel() % self.world_size:
                raise CollectiveError(
                    f"all_to_all: {input.numel()} elements do not split into {self.world_size} equal parts"
                )
            route = self._decided(key, "all_to_all", input, "", "out", (input.numel(),))
        try:
            route.method(input, output)
        except RuntimeError as error:
            raise self._failed("all_to_all", error) from error
        return output

    def send_recv(self, input: torch.Tensor, output: torch.Tensor, dst: int, src: int) -> torch.Tensor:
        """Send input to dst while output is received from src; all ranks may call it at once (a ring)."""
        key = (
            "send_recv", input.dtype, input.numel(), input.is_contiguous(), *_facts(output), dst, src, self._mode
        )  # fmt: skip
        route = self._routes.get(key)
        if route is None:
            self._check_rank("send_recv", "dst", dst)
            self._check_rank("send_recv", "src", src)
            self._check_like("send_recv", input, output, 1, 1)
            route = self._decided(key, "send_recv", input, "", "out", (input.numel(),))
        try:
            route.method(input, output, dst, src)
        except RuntimeError as error:
            raise self._failed("send_recv", error) from error
        return output

    def barrier(self) -> None:
        """Returns on no rank before every rank has called it."""
        key = ("barrier", self._mode)
        route = self._routes.get(key)
        if route is None:
            route = self._decided(key, "barrier", None, "", "in", ())
        try:
            route.method()
        except RuntimeError as error:
            raise self._failed("barrier", error) from error

    # ---- checks ---------------------------------------------------------------------------------------

    def _check_like(self, what: str, a: torch.Tensor, b: torch.Tensor, parts_a: int, parts_b: int) -> None:
        if a.dtype != b.dtype:
            raise CollectiveError(f"{what}: input is {a.dtype} but out is {b.dtype}")
        if a.numel() * parts_b != b.numel() * parts_a:
            raise CollectiveError(
                f"{what}: input has {a.numel()} elements and out {b.numel()}; with {self.world_size} ranks "
                f"they must stand as {parts_a} : {parts_b}"
            )

    def _check_rank(self, what: str, name: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise CollectiveError(f"{what}: {name}={rank} is no rank of a group of {self.world_size}")

    def _check_root(self, what: str, name: str, tensor: torch.Tensor | None, root: int) -> None:
        if (tensor is not None) != (root == self.rank_in_group):
            raise CollectiveError(f"{what}: {name} is needed on rank {root} and only there")

    def _dim(self, what: str, tensor: torch.Tensor, dim: int) -> int:
        """dim as a non-negative number."""
        if not -tensor.dim() <= dim < tensor.dim():
            raise CollectiveError(f"{what}: dim={dim} is no dimension of a tensor of shape {tuple(tensor.shape)}")
        return dim % tensor.dim()

    def _rows(self, what: str, sizes: Sequence[int] | None, total: int | None) -> tuple[int, ...]:
        """sizes as a checked tuple. total: what they must sum up to; sizes None: total in equal parts."""
        n = self.world_size
        if sizes is None:
            assert total is not None
            if total % n:
                raise CollectiveError(f"{what}: {total} rows do not split into {n} equal parts; say sizes")
            return (total // n,) * n
        rows = tuple(sizes)
        if len(rows) != n:
            raise CollectiveError(f"{what}: sizes {list(rows)} has {len(rows)} entries, the group {n} ranks")
        if any(isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in rows):
            raise CollectiveError(f"{what}: sizes {list(rows)} must be whole numbers of rows, none below 0")
        if total is not None and sum(rows) != total:
            raise CollectiveError(f"{what}: sizes {list(rows)} sum up to {sum(rows)}, input has {total} rows")
        return rows

    def _along(self, gathered: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
        """(world_size, *shape) with the ranks' parts side by side in dimension dim."""
        if dim:
            gathered = gathered.movedim(0, dim)
        return gathered.reshape((*shape[:dim], self.world_size * shape[dim], *shape[dim + 1 :]))


def _placement(in_place: bool) -> str:
    return "in" if in_place else "out"


def _facts(tensor: torch.Tensor) -> Facts:
    """What a key must hold of a second tensor, so that its shape is checked once per combination."""
    return tensor.dtype, tensor.numel(), tensor.is_contiguous()


def _inside(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether part lies in whole's memory (an in-place all_gather or reduce_scatter)."""
    offset: int = part.data_ptr() - whole.data_ptr()
    return 0 <= offset < max(1, whole.numel() * whole.element_size())

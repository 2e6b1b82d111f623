"""Which communicators a group may set up: hints, since a policy still decides what a call takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

# hint → the backends that it stands for
_BACKENDS: dict[str, tuple[str, ...]] = {
    "pynccl": ("pynccl", "nccl_symm"),
    "pymscclpp": ("pymscclpp",),
    "custom_allreduce": ("ca", "qr"),
    "torch_symm_mem": ("symm_mem", "symm_mem_multimem", "symm_mem_twoshot", "symm_mem_oneshot"),
    "hpu": ("hpu",),
    "xpu": ("xpu",),
    "npu": ("npu",),
}


@dataclass(frozen=True, slots=True)
class Hints:
    """A hint that is false keeps its backends from being set up, and says so in their reason.

    message_queue: ``broadcast_object`` from rank 0 goes through shared memory.
    """

    pynccl: bool = True
    pymscclpp: bool = True
    custom_allreduce: bool = True
    torch_symm_mem: bool = True
    hpu: bool = True
    xpu: bool = True
    npu: bool = True
    message_queue: bool = False

    @classmethod
    def none(cls) -> Hints:
        """Only torch.distributed and what a CPU group has."""
        return cls(**{f.name: False for f in fields(cls)})

    def switched_off(self) -> dict[str, str]:
        """Backend → why it is not to be set up."""
        return {
            backend: f"turned off for this group ({hint}=False)"
            for hint, backends in _BACKENDS.items()
            if not getattr(self, hint)
            for backend in backends
        }

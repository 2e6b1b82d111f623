"""What policies need to know of a GPU by its name: capability and links. Facts from the vendors' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from commbench.errors import UsageError, unknown


@dataclass(frozen=True, slots=True)
class Gpu:
    """device: cuda, hip or cpu. capability: CUDA's (major, minor); for hip (9, 4) is gfx942 and (9, 5) gfx950.
    nvlink: all GPUs of a usual node are linked by NVLink, NVSwitch or XGMI. multicast: NVSwitch multicast (NVLS)."""

    name: str
    device: str
    capability: tuple[int, int]
    nvlink: bool
    multicast: bool

    @property
    def architecture(self) -> str:
        """``sm90``, ``gfx942`` or ``cpu``."""
        major, minor = self.capability
        if self.device == "hip":
            return {(9, 4): "gfx942", (9, 5): "gfx950"}.get((major, minor), f"gfx{major}{minor}")
        return f"sm{major}{minor}" if self.device == "cuda" else self.device


GPUS: dict[str, Gpu] = {
    g.name: g
    for g in (
        Gpu("cpu", "cpu", (0, 0), False, False),
        Gpu("v100", "cuda", (7, 0), True, False),
        Gpu("t4", "cuda", (7, 5), False, False),
        Gpu("a100", "cuda", (8, 0), True, False),
        Gpu("a100-pcie", "cuda", (8, 0), False, False),
        Gpu("a10g", "cuda", (8, 6), False, False),
        Gpu("a40", "cuda", (8, 6), False, False),
        Gpu("rtx3090", "cuda", (8, 6), False, False),
        Gpu("rtx4090", "cuda", (8, 9), False, False),
        Gpu("l4", "cuda", (8, 9), False, False),
        Gpu("l40s", "cuda", (8, 9), False, False),
        Gpu("h100", "cuda", (9, 0), True, True),
        Gpu("h100-pcie", "cuda", (9, 0), False, False),
        Gpu("h20", "cuda", (9, 0), True, True),
        Gpu("h200", "cuda", (9, 0), True, True),
        Gpu("gh200", "cuda", (9, 0), True, True),
        Gpu("b200", "cuda", (10, 0), True, True),
        Gpu("gb200", "cuda", (10, 0), True, True),
        Gpu("b300", "cuda", (10, 3), True, True),
        Gpu("gb300", "cuda", (10, 3), True, True),
        Gpu("vr200", "cuda", (10, 7), True, True),
        Gpu("rtx5090", "cuda", (12, 0), False, False),
        Gpu("rtx-pro-6000", "cuda", (12, 0), False, False),
        Gpu("mi300x", "hip", (9, 4), True, False),
        Gpu("mi325x", "hip", (9, 4), True, False),
        Gpu("mi350x", "hip", (9, 5), True, False),
        Gpu("mi355x", "hip", (9, 5), True, False),
    )
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name, whatever its case. Raises UnknownName."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise unknown("gpu", name, GPUS)
    return gpu


def from_architecture(text: str) -> Gpu:
    """A GPU from ``sm90``, ``sm_103``, ``gfx942`` or ``cpu``; links as on the best-known board of that kind.

    Raises UsageError for anything else.
    """
    word = text.lower().replace("_", "")
    known = next((g for g in GPUS.values() if g.architecture == word), None)
    match = re.fullmatch(r"sm(\d+)(\d)", word)
    if match:
        capability = (int(match[1]), int(match[2]))
        linked = capability[0] in (7, 8, 9, 10) and (known is None or known.nvlink)
        return Gpu(word, "cuda", capability, linked, linked and capability[0] in (9, 10))
    if known is not None:
        return Gpu(word, known.device, known.capability, known.nvlink, known.multicast)
    raise UsageError(f"architecture {text!r} is not like sm90, sm103, gfx942 or cpu")

"""What a model sends: its collectives per step, and the time they take under a policy.

Under tensor parallelism every decoder layer ends its attention and its MLP with one all-reduce of tokens × hidden
elements (Megatron-LM, Shoeybi et al. 2019, section 3), and the parallel embedding with one more. With experts spread
over ranks and exchanged by all-to-all, each layer of experts sends tokens × top-k × hidden elements there and back in
place of its all-reduce.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commbench.errors import UsageError
from commbench.types import DTYPES
from commbench.units import format_size

if TYPE_CHECKING:
    import pandas as pd

    from commbench.analysis.tune import CellTuning, Tuning

DENSE = frozenset(
    {
        "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM",
        "Gemma2ForCausalLM", "Phi3ForCausalLM", "InternLM2ForCausalLM", "Olmo2ForCausalLM",
    }
)  # fmt: skip
EXPERTS = frozenset(
    {
        "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM", "GptOssForCausalLM",
    }
)  # fmt: skip
EXCHANGES = ("all_reduce", "all_to_all")
PHASES = ("decode", "prefill")
UNCLEAR = ("backend_requested", "policy", "placement", "layout", "mode", "group", "cache")  # what tells points apart

# (collective, dtype, size in bytes of the total array) → seconds
LatencyOf = Callable[[str, str, int], float]


@dataclass(frozen=True, slots=True)
class Model:
    """What a Hugging Face ``config.json`` says that matters here. moe_layers: layers whose MLP is made of experts."""

    architecture: str
    layers: int
    hidden: int
    dtype: str
    moe_layers: int = 0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Calls:
    """``count`` calls of one collective at one size (bytes of the total array) in one step."""

    collective: str
    size_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Step:
    """Steps of one kind: the share of its phase's steps that they are, their tokens, and what they send."""

    phase: str
    share: float
    tokens: int
    calls: tuple[Calls, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model on tp ranks, and the steps that it makes. Shares sum to 1 within each phase."""

    name: str
    tp: int
    dtype: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class StepChange:
    """Time in collectives per step of a phase on both sides, in milliseconds (geometric mean over launches), and the
    ratio of candidate over baseline with its interval; NaN ends where a side has one launch."""

    phase: str
    base_ms: float
    cand_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    base_launches: int
    cand_launches: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time in collectives per step of a phase under one policy, in milliseconds, as a mean over its steps."""

    phase: str
    policy: str
    milliseconds: float


def model_of(config: Mapping[str, Any], where: str = "config.json") -> Model:
    """The model that a ``config.json`` describes.

    Raises UsageError for an architecture that is not known here, and for a number that is missing.
    """
    names = config.get("architectures") or []
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    if architecture not in DENSE | EXPERTS:
        known = ", ".join(sorted(DENSE | EXPERTS))
        raise UsageError(f"{where}: architecture {architecture or 'none'!r} is not known; known: {known}")

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            value = config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
        if default is None:
            raise UsageError(f"{where}: {' or '.join(keys)} is missing or no whole number")
        return default

    layers, hidden = number("num_hidden_layers"), number("hidden_size")
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    moe_layers = top_k = 0
    if architecture in EXPERTS:
        top_k = number("num_experts_per_tok", "experts_per_token")
        moe_layers = len(_expert_layers(config, architecture, layers, number))
    return Model(architecture, layers, hidden, dtype, moe_layers, top_k)


def _expert_layers(config: Mapping[str, Any], architecture: str, layers: int, number: Callable[..., int]) -> list[int]:
    """The layers whose MLP is made of experts, as the model's own configuration class reads these fields."""
    if architecture.startswith("Deepseek"):
        first, every = number("first_k_dense_replace", default=0), number("moe_layer_freq", default=1)
        return [i for i in range(layers) if i >= first and i % max(1, every) == 0]
    if architecture.startswith("Qwen"):
        step, dense = number("decoder_sparse_step", default=1), set(config.get("mlp_only_layers") or ())
        return [i for i in range(layers) if i not in dense and (i + 1) % max(1, step) == 0]
    return list(range(layers))


def calls_of(model: Model, tokens: int, *, dtype: str, ep: int = 1, exchange: str = "all_reduce") -> tuple[Calls, ...]:
    """What one forward step over that many tokens sends under tensor parallelism.

    exchange: how experts on ``ep`` ranks get their tokens: ``all_reduce`` (every rank computes its experts' part of
    all tokens) or ``all_to_all`` (tokens travel).
    """
    size = tokens * model.hidden * DTYPES[dtype].itemsize
    reduced = 1 + 2 * model.layers
    calls = []
    if ep > 1 and exchange == "all_to_all" and model.moe_layers:
        reduced -= model.moe_layers
        calls.append(Calls("all_to_all", size * model.top_k, 2 * model.moe_layers))
    return (Calls("all_reduce", size, reduced), *calls)


def workload_of(
    model: Model,
    tokens: Mapping[str, Mapping[int, float]],
    *,
    name: str,
    tp: int,
    dtype: str = "",
    ep: int = 1,
    exchange: str = "all_reduce",
) -> Workload:
    """A workload from a model and, per phase, tokens per step → how often (any positive weights).

    Raises UsageError for a dtype, a phase or an exchange that does not exist, for tp below 2 (nothing is sent), for
    experts asked of a model without, and for an empty distribution.
    """
    dtype = dtype or model.dtype
    if dtype not in DTYPES:
        raise UsageError(f"{name}: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if tp < 2:
        raise UsageError(f"{name}: tp = {tp} sends nothing; it takes at least 2 ranks")
    if exchange not in EXCHANGES:
        raise UsageError(f"{name}: exchange {exchange!r} is not one of {', '.join(EXCHANGES)}")
    if ep > 1 and not model.moe_layers:
        raise UsageError(f"{name}: ep = {ep}, but {model.architecture} has no experts")
    steps = []
    for phase, distribution in tokens.items():
        if phase not in PHASES:
            raise UsageError(f"{name}: phase {phase!r} is not one of {', '.join(PHASES)}")
        total = float(sum(distribution.values()))
        if not distribution or total <= 0:
            raise UsageError(f"{name}: {phase} names no tokens; write tokens = {{ 1 = 0.5, 64 = 0.5 }}")
        for count, weight in sorted(distribution.items()):
            if count < 1 or weight < 0:
                raise UsageError(f"{name}: {phase}: {count} tokens with weight {weight} make no step")
            if weight:
                calls = calls_of(model, count, dtype=dtype, ep=ep, exchange=exchange)
                steps.append(Step(phase, weight / total, count, calls))
    if not steps:
        raise UsageError(f"{name}: no step is described; write [decode] or [prefill] with tokens = {{ … }}")
    return Workload(name, tp, dtype, tuple(steps))


def step_seconds(load: Workload, latency_of: LatencyOf) -> dict[str, float]:
    """Phase → mean seconds that a step spends in collectives, given the latency of each."""
    total: dict[str, float] = {}
    for step in load.steps:
        time_s = sum(c.count * latency_of(c.collective, load.dtype, c.size_bytes) for c in step.calls)
        total[step.phase] = total.get(step.phase, 0.0) + step.share * time_s
    return total


def interpolated(sizes: Sequence[int], latencies_s: Sequence[float], size_bytes: int, what: str) -> float:
    """A latency between two measured sizes, on a straight line in log-log; never beyond them.

    sizes: ascending bytes. Raises UsageError for a size outside, naming ``what`` was measured.
    """
    if not sizes or not sizes[0] <= size_bytes <= sizes[-1]:
        measured = f"{format_size(sizes[0])} to {format_size(sizes[-1])}" if sizes else "nothing"
        raise UsageError(
            f"the workload sends {what} of {size_bytes} bytes ({format_size(size_bytes)}), measured is {measured}; "
            "measure that size, or take it out of the workload"
        )
    right = bisect.bisect_left(sizes, size_bytes)
    if sizes[right] == size_bytes:
        return float(latencies_s[right])
    left = right - 1
    part = math.log(size_bytes / sizes[left]) / math.log(sizes[right] / sizes[left])
    return float(math.exp((1 - part) * math.log(latencies_s[left]) + part * math.log(latencies_s[right])))


def measured(points: pd.DataFrame, world_size: int, what: str) -> LatencyOf:
    """Latencies from one side of a comparison, for ``step_seconds``.

    points: one row per point (launches merged), with collective, dtype, world_size, size_bytes, latency_median_s; rows
    without a latency are left out. what: the side's name, for messages. The function raises UsageError for what was
    not measured; so does this one where a size has several rows (several backends or policies: choose one side first).
    """
    own = points[(points["world_size"] == world_size) & points["latency_median_s"].notna()]
    curves: dict[tuple[str, str], dict[int, float]] = {}
    sizes_of = own["size_bytes"].to_numpy(dtype="int64").tolist()
    latencies_of = own["latency_median_s"].to_numpy(dtype="float64").tolist()
    for name, kind, size, latency_s in zip(own["collective"], own["dtype"], sizes_of, latencies_of, strict=True):
        curve = curves.setdefault((str(name), str(kind)), {})
        if size in curve:
            raise UsageError(
                f"{what} has several points of {name} {kind} at {format_size(size)}; "
                "a workload needs one latency for each size"
            )
        curve[size] = latency_s

    def latency(collective: str, dtype: str, size_bytes: int) -> float:
        curve = curves.get((collective, dtype))
        if curve is None:
            raise UsageError(f"the workload sends {collective} of {dtype} on {world_size} ranks; {what} has none")
        sizes = sorted(curve)
        return interpolated(sizes, [curve[s] for s in sizes], size_bytes, f"{collective} {dtype}")

    return latency


def steps_of_sides(
    load: Workload, base: pd.DataFrame, cand: pd.DataFrame, names: tuple[str, str], *, in_pairs: bool = False
) -> list[StepChange]:
    """Per phase, the milliseconds per step of both sides, and their ratio with its 95 % interval.

    base, cand: one row per point and launch, with the columns of ``store.latencies``. Each launch that measured all
    that the workload sends gives one time per step; the interval is over launches (Welch's t on logarithms; over the
    differences of pairs where ``in_pairs``). Where several points answer for one size, the policy's own pick (``auto``)
    and hot buffers are taken. Raises UsageError for what no launch of a side measured, and where it is still unclear
    which point counts.
    """
    import numpy as np

    from commbench.analysis.effects import paired, welch

    sides = [_seconds_by_launch(load, frame, name) for frame, name in zip((base, cand), names, strict=True)]
    if in_pairs:
        both = sorted(set(sides[0]) & set(sides[1]))
        if not both:
            raise UsageError(f"no launch of both {names[0]} and {names[1]} measured all that the workload sends")
        sides = [{launch: side[launch] for launch in both} for side in sides]
    phases = [phase for phase in PHASES if any(step.phase == phase for step in load.steps)]
    logs = [np.log([[seconds[phase] for seconds in side.values()] for phase in phases]) for side in sides]
    effects = (paired if in_pairs else welch)(*logs)
    low, high = effects.interval()
    ratios, lows, highs = (np.exp(values).tolist() for values in (effects.estimate, low, high))
    middles = [1e3 * np.exp(matrix.mean(axis=1)) for matrix in logs]
    return [
        StepChange(
            phase,
            float(middles[0][i]),
            float(middles[1][i]),
            ratios[i],
            lows[i],
            highs[i],
            len(sides[0]),
            len(sides[1]),
        )
        for i, phase in enumerate(phases)
    ]


def _seconds_by_launch(load: Workload, points: pd.DataFrame, what: str) -> dict[int, dict[str, float]]:
    """Launch → phase → seconds per step, of the launches that measured all that the workload sends."""
    own = points[(points["status"] == "ok") & (points["world_size"] == load.tp)]
    collectives = {c.collective for step in load.steps for c in step.calls}
    own = own[own["collective"].isin(collectives) & (own["dtype"] == load.dtype) & own["op"].isin(["", "sum"])]
    for column, wanted in (("backend_requested", "auto"), ("cache", "hot")):
        if wanted in set(own[column]):
            own = own[own[column] == wanted]
    unclear = [name for name in UNCLEAR if own[name].nunique() > 1]
    if unclear:
        texts = [f"{name} ({', '.join(sorted(map(str, own[name].unique())))})" for name in unclear]
        raise UsageError(
            f"{what} has more than one {' and '.join(texts)}; a workload needs one latency for each size: "
            "line two of them up with --by, or measure one"
        )
    found, refused = {}, None
    for launch in sorted({int(number) for number in own["launch"]}):
        try:
            found[launch] = step_seconds(load, measured(own[own["launch"] == launch], load.tp, what))
        except UsageError as error:
            refused = error
    if not found:
        if refused is not None:
            raise refused
        step_seconds(load, measured(own, load.tp, what))  # says what is missing
    return found


def steps_under(tuning: Tuning, load: Workload) -> list[StepTime]:
    """Per phase, the time per step under today's policy (where it was measured), the tuned one, and the fastest
    backend at every size.

    Raises UsageError where the workload sends what was not measured: a collective, dtype, world size or size.
    """
    cells = {c.collective: _cell_for(tuning, load, c.collective) for step in load.steps for c in step.calls}

    def pick(choose: Callable[[CellTuning, int], str]) -> LatencyOf:
        def latency(collective: str, dtype: str, size_bytes: int) -> float:
            cell = cells[collective]
            sizes, times = _curve(cell, choose(cell, size_bytes))
            return interpolated(sizes, times, size_bytes, f"{collective} {dtype}")

        return latency

    policies: dict[str, LatencyOf] = {}
    if all(all(c.curves.today) for c in cells.values()):
        policies["today"] = pick(_today)
    policies["tuned"] = pick(lambda cell, size: cell.pick(size))
    policies["fastest"] = pick(_fastest)
    found = []
    for name, latency in policies.items():
        found += [StepTime(phase, name, 1e3 * s) for phase, s in step_seconds(load, latency).items()]
    return sorted(found, key=lambda s: PHASES.index(s.phase))


def _cell_for(tuning: Tuning, load: Workload, collective: str) -> CellTuning:
    for cell in tuning.cells:
        k = cell.cell
        if (k.collective, k.dtype, k.world_size) == (collective, load.dtype, load.tp):
            return cell
    have = "; ".join(c.cell.title for c in tuning.cells)
    raise UsageError(
        f"the workload sends {collective} of {load.dtype} on {load.tp} ranks, which was not measured (measured: {have})"
    )


def _curve(cell: CellTuning, backend: str) -> tuple[list[int], list[float]]:
    cost = cell.curves.typical()[:, cell.curves.backends.index(backend)]
    known = [(s, math.exp(c)) for s, c in zip(cell.curves.sizes, cost, strict=True) if math.isfinite(c)]
    return [s for s, _ in known], [t for _, t in known]


def _today(cell: CellTuning, size_bytes: int) -> str:
    """What today's policy takes at the next measured size up to this one's (its thresholds lie between sizes)."""
    from commbench.analysis.tune import check_inside

    check_inside(cell.curves, size_bytes)
    return cell.curves.today[bisect.bisect_right(cell.curves.sizes, size_bytes) - 1]


def _fastest(cell: CellTuning, size_bytes: int) -> str:
    from commbench.analysis.tune import check_inside

    check_inside(cell.curves, size_bytes)
    best, best_s = "", math.inf
    for backend in cell.curves.backends:
        sizes, times = _curve(cell, backend)
        if sizes and sizes[0] <= size_bytes <= sizes[-1]:
            time_s = interpolated(sizes, times, size_bytes, backend)
            if time_s < best_s:
                best, best_s = backend, time_s
    return best

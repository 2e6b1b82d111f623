"""What a user describes on the command line, as a platform: GPU, ranks, nodes, links, switches, variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commbench.errors import UsageError, unknown
from commbench.policy.evaluate import Policy
from commbench.policy.gpus import Gpu, find_gpu, from_architecture
from commbench.types import Platform


@dataclass(frozen=True, slots=True)
class Request:
    """A machine in the user's words. topology: nvlink or pcie ("" for what the GPU usually has)."""

    gpu: str = ""
    architecture: str = ""
    world_size: int = 8
    nnodes: int = 1
    topology: str = ""
    enable: tuple[str, ...] | None = None
    env: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    group: str = "tp"

    def hardware(self) -> Gpu:
        """The GPU meant. Raises UsageError where gpu and architecture are both given, UnknownName for neither known."""
        if self.gpu and self.architecture:
            raise UsageError(f"--gpu {self.gpu} and --arch {self.architecture} both say what the GPU is; give one")
        if self.architecture:
            return from_architecture(self.architecture)
        return find_gpu(self.gpu or "h100")

    def platform(self, policy: Policy, lenient: bool = False) -> Platform:
        """The platform, under that policy. Raises UsageError for a switch, variable or parameter that it lacks;
        lenient leaves those out (for two policies asked about one machine)."""
        gpu = self.hardware()
        linked = gpu.nvlink if not self.topology else self.topology == "nvlink"
        on_cpu = gpu.device == "cpu"
        return Platform(
            device=gpu.device,
            capability=gpu.capability,
            world_size=self.world_size,
            nnodes=self.nnodes,
            one_host=self.nnodes == 1,
            nvlink=linked and not on_cpu,
            multicast=linked and gpu.multicast,
            group=self.group,
            cpu_flags=frozenset({"amx"}) if on_cpu else frozenset(),
            requested=self._requested(policy, lenient),
            env=self._variables(policy, lenient),
            settings=self._settings(policy, lenient),
        )

    def place(self) -> str:
        """The machine in words: ``8 x h100 (sm90) on one node, NVLink with multicast``."""
        gpu = self.hardware()
        nodes = "on one node" if self.nnodes == 1 else f"over {self.nnodes} nodes"
        if gpu.device == "cpu":
            return f"{self.world_size} ranks on CPU (with AMX) {nodes}"
        name = gpu.name if gpu.name == gpu.architecture else f"{gpu.name} ({gpu.architecture})"
        linked = gpu.nvlink if not self.topology else self.topology == "nvlink"
        links = "XGMI" if gpu.device == "hip" else "NVLink"
        how = "PCIe only" if not linked else f"{links} with multicast" if gpu.multicast else links
        tag = "" if self.group == "tp" else f", group {self.group}"
        return f"{self.world_size} x {name} {nodes}, {how}{tag}"

    def _requested(self, policy: Policy, lenient: bool) -> frozenset[str] | None:
        if self.enable is None:
            return None
        words: set[str] = set()
        for word in self.enable:
            words |= _switches_named(policy, word, lenient)
        # A group has its own NCCL communicator whatever else is asked for; `--enable -pynccl` takes it away.
        if "pynccl" in policy.data.switches and "-pynccl" not in self.enable:
            words.add("pynccl")
        return frozenset(words)

    def _variables(self, policy: Policy, lenient: bool) -> Mapping[str, str]:
        env: dict[str, str] = {}
        for name, value in _pairs("--env", self.env):
            if name not in policy.data.variables:
                if lenient:
                    continue
                known = ", ".join(sorted(policy.data.variables)) or "none"
                raise UsageError(f"policy {policy.name} reads no environment variable {name!r}; it reads {known}")
            env[name] = value
        return env

    def _settings(self, policy: Policy, lenient: bool) -> Mapping[str, str]:
        settings: dict[str, str] = {}
        for name, value in _pairs("--set", self.settings):
            if name not in policy.data.constants:
                if lenient:
                    continue
                raise unknown("parameter", name, policy.data.constants)
            settings[name] = value
        return settings


def _switches_named(policy: Policy, word: str, lenient: bool) -> set[str]:
    """The switches that a user's word means: the switch itself, a route's name, or a backend's (``ca`` for all its
    versions that are on by default, else the first). Raises UnknownName."""
    switches = policy.data.switches
    if word in ("-pynccl", ""):
        return set()
    if word in switches:
        return {word}
    routes = [r for r in policy.data.routes.values() if word in (r.name, r.word, r.backend) and r.switches]
    named = [s for r in routes for s in r.switches]
    if not named and lenient:
        return set()
    if not named:
        raise unknown("switch", word, switches)
    default = {s for s in named if switches[s].default_on}
    return default or {named[0]}


def _pairs(flag: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{flag} {text!r} is not NAME=VALUE")
        pairs.append((name, value))
    return pairs

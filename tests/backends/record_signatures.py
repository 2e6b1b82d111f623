"""Read the providers' published wheels, and keep the signatures that backends call: tests/backends/signatures/*.json.

Run from the checkout, with folders of wheels that are there already (others are downloaded, most are hundreds of MB):

    python -m tests.backends.record_signatures [--wheels DIR] [provider ...]

Nothing of a wheel is imported or run: Python files are parsed, headers read, operator schemas searched for in binaries.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SIGNATURES = HERE / "signatures"
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a provider's signatures stand.

    python: file in the wheel → functions (``Class.method`` for methods) and constants (``Class.NAME``).
    binaries: shared libraries to search for operator schemas of those functions. header: a C header, and the functions,
    constants and structures of it.
    """

    requirement: str
    python: dict[str, tuple[str, ...]] = field(default_factory=dict)
    binaries: tuple[str, ...] = ()
    header: str = ""
    functions: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    constants_header: str = ""  # where it is another file
    pip_options: tuple[str, ...] = ()


_CA = ("init_custom_ar", "all_reduce", "register_buffer", "get_graph_buffer_ipc_meta", "register_graph_buffers",
       "meta_size", "dispose")  # fmt: skip
_CA_ON_ROCM = ("all_reduce_reg", "all_reduce_unreg", "allocate_meta_buffer", "get_meta_buffer_ipc_handle")
_QR = ("init_custom_qr", "qr_get_handle", "qr_open_handles", "qr_all_reduce", "qr_max_size", "qr_destroy")
_MSCCLPP = ("mscclpp_generate_unique_id", "mscclpp_init_context", "mscclpp_allreduce")

SOURCES: dict[str, Source] = {
    "sgl_kernel": Source(
        "sgl-kernel==0.3.21",
        {"sgl_kernel/allreduce.py": (*_CA, *_CA_ON_ROCM, *_QR, *_MSCCLPP)},
        binaries=("sgl_kernel/sm90/common_ops.abi3.so",),
    ),
    "vllm": Source(
        "vllm==0.33.0", {"vllm/_custom_ops.py": _CA}, binaries=("vllm/_C_stable_libtorch.abi3.so",)
    ),
    "flashinfer": Source(
        "flashinfer-python==0.7.4",
        {
            "flashinfer/comm/vllm_ar.py": _CA,
            "flashinfer/comm/allreduce.py": (
                "create_allreduce_fusion_workspace",
                "allreduce_fusion",
                "TRTLLMAllReduceFusionWorkspace.is_buffer_size_sufficient",
            ),
            "flashinfer/comm/workspace_base.py": ("AllReduceFusionWorkspace.destroy",),
            "flashinfer/comm/comm_backend.py": ("TorchDistBackend.__init__",),
            "flashinfer/comm/trtllm_ar.py": ("AllReduceFusionPattern.kAllReduce",),
            "flashinfer/comm/__init__.py": ("from",),
        },
    ),
    "aiter": Source(
        "amd-aiter==0.1.7.post2.dev18",
        {"aiter/ops/quick_all_reduce.py": _QR},
        pip_options=("--python-version", "3.12", "--only-binary=:all:", "--pre"),
    ),
    "nccl": Source(
        "nvidia-nccl-cu13==2.32.3",
        header="nvidia/nccl/include/nccl.h",
        functions=(
            "ncclGetVersion", "ncclGetUniqueId", "ncclGetErrorString", "ncclGetLastError", "ncclCommInitRankConfig",
            "ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort", "ncclGroupStart",
            "ncclGroupEnd", "ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclBroadcast", "ncclReduce",
            "ncclSend", "ncclRecv", "ncclMemAlloc", "ncclMemFree", "ncclCommWindowRegister",
            "ncclCommWindowDeregister",
        ),
        constants=(
            "NCCL_UNIQUE_ID_BYTES", "NCCL_API_MAGIC", "NCCL_WIN_COLL_SYMMETRIC", "ncclSuccess", "ncclInProgress",
            "ncclSum", "ncclProd", "ncclMax", "ncclMin", "ncclAvg", "ncclInt8", "ncclUint8", "ncclInt32", "ncclInt64",
            "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2",
        ),
    ),
    "cudart": Source(
        "nvidia-cuda-runtime==13.5.37",
        header="cuda_runtime_api.h",
        functions=(
            "cudaMalloc", "cudaFree", "cudaMemset", "cudaDeviceSynchronize", "cudaIpcGetMemHandle",
            "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle", "cudaGetErrorString",
        ),
        constants=("cudaIpcMemLazyEnablePeerAccess",),
        constants_header="driver_types.h",
    ),
}  # fmt: skip

# ---- Python files -----------------------------------------------------------------------------------------------


def python_functions(text: str, names: Sequence[str]) -> dict[str, Record]:
    """Name → its parameters. A file that defines a function for CUDA and another for ROCm gives ``name`` and
    ``name@hip``."""
    found: dict[str, Record] = {}
    for suffix, node in _definitions(ast.parse(text).body, ""):
        name = node.name if isinstance(node, ast.FunctionDef) else ""
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and f"{node.name}.{inner.name}" in names:
                    found[f"{node.name}.{inner.name}"] = _parameters(inner)
                if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name):
                    constant = f"{node.name}.{inner.targets[0].id}"
                    if constant in names:
                        found[constant] = {"value": ast.literal_eval(inner.value)}
        elif name in names:
            found[name + suffix] = _parameters(node)
    return found


def _definitions(body: list[ast.stmt], suffix: str) -> Iterator[tuple[str, Any]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield suffix, node
        elif isinstance(node, ast.If) and "torch.version.hip" in ast.unparse(node.test):
            yield from _definitions(node.body, "@hip")
            yield from _definitions(node.orelse, "")


def _parameters(node: ast.FunctionDef) -> Record:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parameters = [
        {"name": a.arg, "type": ast.unparse(a.annotation) if a.annotation else "", "optional": i >= required}
        for i, a in enumerate(positional)
    ]
    parameters += [
        {
            "name": a.arg, "type": ast.unparse(a.annotation) if a.annotation else "",
            "optional": default is not None, "keyword_only": True,
        }
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]  # fmt: skip
    return {"parameters": parameters, "returns": ast.unparse(node.returns) if node.returns else ""}


def imported_names(text: str) -> dict[str, str]:
    """Name in a package → ``module.name`` that it is imported from."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


# ---- binaries ---------------------------------------------------------------------------------------------------


def schemas(wheel: zipfile.ZipFile, member: str, names: Sequence[str]) -> dict[str, str]:
    """Operator → its schema, as the library registers it with torch."""
    pattern = re.compile(
        rb"\b(" + b"|".join(n.encode() for n in names) + rb")\([^()\0]*\) -> (?:\([^()\0]*\)|[\w\[\]?]+)"
    )
    found: dict[str, str] = {}
    with wheel.open(member) as stream:
        rest = b""
        while block := stream.read(1 << 24):
            for match in pattern.finditer(rest + block):
                found.setdefault(match[1].decode(), match[0].decode())
            rest = block[-4096:]
    return found


# ---- headers ----------------------------------------------------------------------------------------------------


def c_functions(text: str, names: Sequence[str]) -> dict[str, Record]:
    """Function → its result and parameters, in C."""
    plain = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    found = {}
    for name in names:
        match = re.search(r"([A-Za-z_][\w \t*]*?[\s*])" + name + r"\s*\(([^()]*)\)\s*;", plain)
        if match is None:
            continue
        result = _c_type(re.sub(r"\b(extern|CUDARTAPI|__host__|__cudart_builtin__|__device__)\b", " ", match[1]))
        parts = [p.strip() for p in match[2].split(",")]
        parameters = [] if parts in ([""], ["void"]) else [_c_parameter(p) for p in parts]
        found[name] = {"returns": result, "parameters": parameters}
    return found


def _c_type(text: str) -> str:
    words = re.sub(r"\bconst\b", " ", text).replace("*", " * ").split()
    return " ".join(words).replace(" *", "*")


def _c_parameter(text: str) -> Record:
    text = re.sub(r"__dv\(.*", "", text)
    match = re.fullmatch(r"(.*?)(\w+)\s*", text.strip(), re.DOTALL)
    assert match is not None, text
    return {"name": match[2], "type": _c_type(match[1])}


def c_constants(text: str, names: Sequence[str]) -> dict[str, int]:
    """#defines and enumerators with a literal value."""
    found = {}
    for name in names:
        match = re.search(rf"(?:#define\s+{name}\s+|\b{name}\s*=\s*)(0x[0-9a-fA-F]+|\d+)", text)
        if match is not None:
            found[name] = int(match[1], 0)
    return found


# ---- a provider -------------------------------------------------------------------------------------------------


def read_wheel(source: Source, wheel_file: Path) -> Record:
    """What the wheel says of everything that ``source`` names."""
    record: Record = {"package": source.requirement, "wheel": wheel_file.name}
    with zipfile.ZipFile(wheel_file) as wheel:
        wanted: list[str] = []
        for file, names in source.python.items():
            text = wheel.read(file).decode()
            if names == ("from",):
                record["exports"] = {k: v for k, v in imported_names(text).items() if v.split(".")[-1] in wanted}
                continue
            record.setdefault("files", {})[file] = python_functions(text, names)
            wanted += [n.partition(".")[0] for n in names]
        for member in source.binaries:
            record.setdefault("schemas", {}).update(schemas(wheel, member, wanted))
        if source.header:
            member = next(n for n in wheel.namelist() if n.endswith(source.header))
            text = wheel.read(member).decode()
            record["header"] = member
            record["functions"] = c_functions(text, source.functions)
            if source.constants_header:
                text = wheel.read(next(n for n in wheel.namelist() if n.endswith(source.constants_header))).decode()
            record["constants"] = c_constants(text, source.constants)
    return record


def find_wheel(source: Source, folder: Path) -> Path:
    """The wheel in the folder, downloaded if it is not there. Raises subprocess.CalledProcessError."""
    name, _, version = source.requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    found = sorted(folder.glob(pattern))
    if not found:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--retries",
            "0",
            "--dest",
            str(folder),
        ]
        subprocess.run([*command, *source.pip_options, source.requirement], check=True, capture_output=True, text=True)
        found = sorted(folder.glob(pattern))
    return found[0]


def load(provider: str) -> Record:
    """The signatures that are kept."""
    record: Record = json.loads((SIGNATURES / f"{provider}.json").read_text())
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("providers", nargs="*", default=list(SOURCES))
    parser.add_argument("--wheels", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for provider in options.providers:
            source = SOURCES[provider]
            record = read_wheel(source, find_wheel(source, options.wheels or Path(scratch)))
            path = SIGNATURES / f"{provider}.json"
            path.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{path}: {record['wheel']}")


if __name__ == "__main__":
    main()

"""What engines set in their environment for kernels, and the versions of kernel packages that they insist on."""

from __future__ import annotations

from collections.abc import Mapping

from commbench.errors import EngineError

# SGLang 0.5.3 at start-up. A value of the user's is never replaced, not even by what means the same.
DEFAULTS: Mapping[str, str] = {
    "TRTLLM_ENABLE_PDL": "1",
    "CUTE_DSL_LOG_LEVEL": "30",  # logging.WARNING
    "CUTE_DSL_LOG_TO_CONSOLE": "1",  # without it the level has no effect
}


def defaults_for(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of DEFAULTS that the user has not set."""
    return {name: value for name, value in DEFAULTS.items() if name not in environment}


def left_alone(environment: Mapping[str, str]) -> list[str]:
    """Where the engine would replace a value of the user's, and ranks here keep it, in words."""
    value = environment.get("TRTLLM_ENABLE_PDL")
    if value is None or value in ("0", "1"):
        return []
    return [f"TRTLLM_ENABLE_PDL={value!r} is left as you set it; SGLang 0.5.3 would make it '1'"]


def check_versions(installed: Mapping[str, str], environment: Mapping[str, str], engine: str = "SGLang 0.5.3") -> None:
    """Raise EngineError for a kernel package that is older than an engine insists on.

    installed: distribution → version; one that is missing is no error, since every one is optional.
    """
    from commbench.harness.environment.doctor import ENGINE_NEEDS, SKIP_VERSION_CHECK
    from commbench.policy.load import version_key

    if environment.get(SKIP_VERSION_CHECK) == "1":
        return
    for package, needed in ENGINE_NEEDS[engine].items():
        found = installed.get(package)
        if found is not None and version_key(found) < version_key(needed):
            raise EngineError(
                f"{package} {found} is older than the {needed} that {engine} needs: "
                f'pip install "{package}=={needed}"; or set {SKIP_VERSION_CHECK}=1 to skip this check'
            )


def installed_versions(engine: str = "SGLang 0.5.3") -> dict[str, str]:
    """Versions of an engine's kernel packages that are installed here."""
    from importlib.metadata import PackageNotFoundError, version

    from commbench.harness.environment.doctor import ENGINE_NEEDS

    found = {}
    for package in ENGINE_NEEDS[engine]:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

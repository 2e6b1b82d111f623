"""Hugging Face ``config.json`` files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commbench.errors import UsageError


def read_config(path: Path) -> dict[str, Any]:
    """The configuration in a file, or in the folder of a model. Raises UsageError naming the file."""
    source = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror or error}; name a model's config.json") from error
    except ValueError as error:
        raise UsageError(f"{source} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{source} holds no object; name a model's config.json")
    return config

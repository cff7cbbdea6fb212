"""Config files: a CrispConfig as TOML, read as data and written."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crisp_flex.config import CrispConfig
from crisp_flex.errors import ConfigError


def load(path: str | os.PathLike[str]) -> CrispConfig:
    """The config in a TOML file.

    Top-level keys are fields of CrispConfig, and "preset"; `[overrides."model.layers.0"]` is one
    override, a key of digits being a site index. Nothing in the file is run.

    Args:
        path: The file.

    Raises:
        ConfigError: There is no such file, it is no TOML, or a key or value is wrong.
    """
    file = Path(path)
    try:
        settings: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {file} ({error.strerror}): give the path of a TOML file "
            'with lines such as preset = "fast"'
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f'{file} is no TOML ({error}): write lines such as preset = "fast"'
        ) from error
    overrides = settings.get("overrides")
    if isinstance(overrides, dict):
        settings["overrides"] = {
            int(key) if key.isdecimal() else key: _tuples(changes)
            for key, changes in overrides.items()
        }
    try:
        return CrispConfig.from_options(_tuples(settings))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (TypeError, AttributeError) as error:  # a number where a table belongs
        raise ConfigError(f"{file}: a value has the wrong type ({error})") from error


def dump(settings: Mapping[str, Any], *, comments: tuple[str, ...] = ()) -> str:
    """The text of a config file.

    Args:
        settings: Fields of CrispConfig (or "preset") that are text, numbers, booleans or tuples.
        comments: Lines in front.

    Raises:
        ConfigError: A key is no field, or a value is out of range.

    Example:
        >>> print(dump({"preset": "fast", "min_seqlen": 4096}, comments=("by hand",)), end="")
        # by hand
        preset = "fast"
        min_seqlen = 4096
    """
    CrispConfig.from_options(settings)
    lines = [f"# {line}" for line in comments]
    for name, value in settings.items():
        # a JSON string, number, boolean or array of these is TOML too
        lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _tuples(settings: Any) -> Any:  # noqa: ANN401
    """TOML arrays as the tuples that CrispConfig compares and hashes."""
    if not isinstance(settings, dict):
        return settings
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}

"""`crisp-flex quality`: runs the checkout's benchmarks/quality.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import crisp_flex
from crisp_flex.errors import UnavailableError


def run(arguments: Sequence[str], root: Path | None = None) -> int:
    """Run the script and return its exit code.

    Args:
        arguments: Handed on.
        root: The checkout; None is the folder that holds the package.

    Raises:
        UnavailableError: The package does not come from a checkout that has the script.
    """
    script = (root or Path(crisp_flex.__file__).parent.parent) / "benchmarks" / "quality.py"
    if not script.is_file():
        raise UnavailableError(
            f"quality needs a checkout of the project, and there is no {script}: clone it and "
            "install it with pip install -e ."
        )
    return subprocess.run([sys.executable, str(script), *arguments], check=False).returncode

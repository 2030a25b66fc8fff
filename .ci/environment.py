"""Make the virtual environment, or take the one that is there, and write the constraints it needs.

    python3 .ci/environment.py VENV [--torch-index auto|URL|""]

A machine that already has torch (a CUDA image, say) keeps it: the environment then sees the
interpreter's own packages, and torch's exact version replaces the pin of constraints.txt in
VENV/.constraints. Otherwise the pinned release comes from the index of ``--torch-index`` (make:
TORCH_INDEX):

    auto  PyTorch's index of CPU builds where there is no NVIDIA device and the index can be
    reached, else pip's own URL   this one; the set-up ends when it does not have it
    ""    pip's own, in the installation that follows
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

LOWEST, BEYOND = (2, 11), (2, 14)  # torch, as in pyproject.toml
QUERY = "import importlib.metadata as m; print(m.version('torch'))"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REACH = "import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5).close()"
REACH_SECONDS = 10.0  # in all: a name server that does not answer knows no timeout of ours


def torch_version(python: str) -> str | None:
    """Version of the torch that ``python`` would import, without importing it; None when absent or
    unsupported.
    """
    found = subprocess.run([python, "-c", QUERY], capture_output=True, text=True, check=False)
    match = re.match(r"(\d+)\.(\d+)", found.stdout)
    if found.returncode or not match:
        return None
    usable = LOWEST <= (int(match[1]), int(match[2])) < BEYOND
    return found.stdout.strip() if usable else None


def has_nvidia() -> bool:
    """Is there an NVIDIA device, or its driver's tool?"""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def reachable(index: str) -> bool:
    """Does ``index`` answer for torch within REACH_SECONDS?"""
    try:
        return (
            subprocess.run(
                [sys.executable, "-c", REACH, f"{index}/torch/"],
                timeout=REACH_SECONDS,
                capture_output=True,
                check=False,
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def install_torch(python: str, index: str, pin: str) -> bool:
    """Install the pinned torch from ``index``, without what it needs, which the whole installation
    brings.
    """
    print(f"installing {pin} from {index}")
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    done = subprocess.run(
        [
            python,
            "-m",
            "pip",
            "install",
            *quiet,
            "--disable-pip-version-check",
            "--no-deps",
            "--index-url",
            index,
            pin,
        ],
        check=False,
    )
    return done.returncode == 0


def take_torch(python: str, asked: str, pin: str) -> bool:
    """Install torch from the index that ``asked`` means, if any. Returns False when the set-up has
    to end.
    """
    if asked == "auto":
        if has_nvidia():
            return True
        if not reachable(CPU_INDEX):
            print(
                f"{CPU_INDEX} cannot be reached: torch comes from pip's own index, whose build may "
                "be for CUDA"
            )
        elif not install_torch(python, CPU_INDEX, pin):
            print(
                f"no CPU build of {pin}: torch comes from pip's own index, whose build may be for "
                "CUDA"
            )
        return True
    if asked and not install_torch(python, asked, pin):
        print(
            f"{pin} could not be installed from {asked}; TORCH_INDEX= (empty) leaves it to pip's "
            "own index"
        )
        return False
    return True


def has_ensurepip() -> bool:
    """Return whether this interpreter can put pip into an environment."""
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        return False
    return True


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Make the virtual environment and its constraints."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch-index", default="auto", metavar="URL")
    args = parser.parse_args(words)
    if sys.version_info < (3, 11):
        print(
            f"glowplug needs Python 3.11 or newer and this is {sys.version.split()[0]}: make "
            "PYTHON=python3.12 ..."
        )
        return 1
    folder: Path = args.folder
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        if not has_ensurepip():
            print(
                f"{sys.executable} cannot make virtual environments: install its package "
                "(Debian, Ubuntu: apt-get install python3-venv) or choose another: "
                "make PYTHON=python3.12 ..."
            )
            return 1
        inherit = torch_version(sys.executable) is not None
        print(f"making {folder}" + (" on top of the installed torch" if inherit else ""))
        venv.create(folder, system_site_packages=inherit, with_pip=True)
    pins = (Path(__file__).parent.parent / "constraints.txt").read_text()
    pin = re.findall(r"^torch==.*$", pins, flags=re.MULTILINE)[0]
    if torch_version(python) is None and not take_torch(python, args.torch_index, pin):
        return 1
    present = torch_version(python)
    if present:
        pins = pins.replace(pin, f"torch=={present}")
    (folder / ".constraints").write_text(pins)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

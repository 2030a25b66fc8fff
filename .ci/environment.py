"""Make the virtual environment, or take the one that is there, and write the constraints it needs.

    python3 .ci/environment.py VENV

A machine that already has torch (a CUDA image, say) keeps it: the environment then sees the interpreter's own
packages, and torch's exact version replaces the pin of constraints.txt in VENV/.constraints.
"""
import re
import subprocess
import sys
import venv
from pathlib import Path

LOWEST, BEYOND = (2, 11), (2, 14)  # torch, as in pyproject.toml
QUERY = "import importlib.metadata as m; print(m.version('torch'))"


def torch_version(python: str) -> str | None:
    """Version of the torch that ``python`` would import, without importing it; None when absent or unsupported."""
    found = subprocess.run([python, "-c", QUERY], capture_output=True, text=True, check=False)
    match = re.match(r"(\d+)\.(\d+)", found.stdout)
    if found.returncode or not match:
        return None
    usable = LOWEST <= (int(match[1]), int(match[2])) < BEYOND
    return found.stdout.strip() if usable else None


def main(folder: Path) -> int:
    if sys.version_info < (3, 11):
        print(f"glowplug needs Python 3.11 or newer and this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")
        return 1
    python = folder / "bin" / "python"
    if not python.exists():
        inherit = torch_version(sys.executable) is not None
        print(f"making {folder}" + (" on top of the installed torch" if inherit else ""))
        venv.create(folder, system_site_packages=inherit, with_pip=True)
    pins = (Path(__file__).parent.parent / "constraints.txt").read_text()
    present = torch_version(str(python))
    if present:
        pins = re.sub(r"^torch==.*$", f"torch=={present}", pins, flags=re.MULTILINE)
    (folder / ".constraints").write_text(pins)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))

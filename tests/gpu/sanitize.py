"""The tests of all Triton kernels under NVIDIA's compute-sanitizer: accesses out of bounds and
reads of memory that was never written.

``make gpu-sanitize``, or ``python -m tests.gpu.sanitize --output
docs/benchmarks/sanitizer-h200.json``. A few parameters of each test run; files run side by side,
each in a process under the sanitizer, with an allocation for every tensor, so that the sanitizer
sees each tensor's end. CUDA refuses such allocations while a graph is captured (errors 900 and
901), so tests that capture run separately, with torch's allocator. Under initcheck torch does not
fill new tensors, except those of PADDED, and its GEMMs are computed on the host, see ``OnHost``.
Reports of libraries' kernels are counted separately and named. Kernels that were not launched are
listed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "glowplug.kernels."
TESTS = [
    path
    for pattern in ("test_triton_*.py", "test_gpu_*.py")
    for path in sorted((ROOT / "tests" / "kernels").glob(pattern))
    if "compiles" not in path.name
]
TOOLS = ("memcheck", "initcheck")
PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
FOUND = 97  #: exit status of the sanitizer when it found an error
EACH = 2  #: parameters of each test
LAUNCHED, LEFT_OUT = "launched kernels: ", "left out, no time: "
TAIL = 60  #: lines shown of a log that is not clean
#: reports that the sanitizer prints; further ones have no kernel's name, so they count as ours
PRINTED = 50
LIBRARIES = ("cublas", "cutlass", "nvjet", "at::", "cub::", "thrust::", "flashinfer", "deep_gemm")
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")  #: torch's GEMMs, by cuBLAS
CAPTURES = (
    "CUDAGraph",
    "tests.kernels.replays",
)  #: a file with one of these words has tests that capture
ALL_CAPTURE = "test_gpu_replays"  #: prefix of files in which every test captures
#: makers of tensors with rows that by their contract are never written and are read all the same,
#: because a mask would cost time: padding of tiles, pairs of absent experts, the end of a list,
#: splits of a row that has fewer. Under initcheck these tensors are filled with NaN, or the largest
#: integer: a test whose results depend on such a row fails.
PADDED = (
    "mha.decode.mha_decode",
    "mla.decode.decode_splits",
    "moe.align.align",
    "moe.experts.begin",
    "moe.gemm.up",
    "moe.narrow.int4_awq.product",
    "moe.fp8.gemm.product",
    "moe.fp8.gemm_hopper.gated",
    "moe.gemm_hopper.up",
    "moe.narrow.int8.product",
    "moe.fp8.library_layouts.static",
    "moe.fp8.library_layouts.packed",
    "moe.sort.gather_rows",
    "formats.fp8_layout.empty_quantized",
)


Job = tuple[Path, str, bool]  #: a file, a tool, the tests that capture?


@dataclass(frozen=True)
class Outcome:
    """The result of one process.

    Attributes:
        errors: Count of the sanitizer's summary without errors in libraries' kernels; None without
            a summary.
        in_libraries: Errors by library kernel.
        failed: Tests that failed or broke off.
        left_out: Tests for which there was no time.
    """

    file: str
    tool: str
    captured: bool
    errors: int | None
    passed: int
    failed: int
    seconds: float
    kernels: tuple[str, ...]
    left_out: tuple[str, ...]
    log: str
    in_libraries: dict[str, int]

    @property
    def clean(self) -> bool:
        return self.errors == 0 and not self.failed and bool(self.passed)


# ---- inside the sanitizer ------------------------------------------------------------------------


def captures(function: FunctionType) -> bool:
    """Return whether the test, or a function of its module that it calls, captures a graph."""
    source, names = inspect.getsource(function), function.__globals__
    called = [names.get(name) for name in set(re.findall(r"\b(\w+)\(", source))]
    return any(
        "CUDAGraph" in inspect.getsource(one)
        for one in (function, *called)
        if inspect.isfunction(one)
    )


class Few:
    """A pytest plugin: it runs a few parameters of each test function, of those that capture graphs
    or of the others, until the time is over.
    """

    def __init__(self, seconds: float, captured: bool) -> None:
        self._until, self._captured = time.monotonic() + seconds, captured
        self.left_out: list[str] = []

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        by_function: dict[str, list[pytest.Item]] = {}
        for item in items:
            if captures(item.function) is self._captured:  # type: ignore[attr-defined]
                by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
        chosen = [
            random.Random(3).sample(group, min(EACH, len(group))) for group in by_function.values()
        ]
        # the first parameter of every function comes first, so that each test that is left out has
        # run with other parameters
        items[:] = [group[turn] for turn in range(EACH) for group in chosen if turn < len(group)]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self._until:
            self.left_out.append(item.nodeid.rpartition("::")[2])
            pytest.skip("no time left")


@contextmanager
def only_padded_filled() -> Iterator[None]:
    """Make torch fill new tensors of the makers in PADDED only. It fills only where algorithms have
    to be deterministic, as in the tests.
    """
    poison: Any = torch.utils.deterministic
    before, empty, new_empty = poison.fill_uninitialized_memory, torch.empty, torch.Tensor.new_empty

    def telling(make: Callable[..., Any]) -> Any:
        def made(*args: Any, **kind: Any) -> Any:
            caller = sys._getframe(1)
            module = caller.f_globals["__name__"].removeprefix(KERNELS)
            maker = f"{module}.{caller.f_code.co_qualname.partition('.<locals>')[0]}"
            poison.fill_uninitialized_memory = maker in PADDED
            try:
                return make(*args, **kind)
            finally:
                poison.fill_uninitialized_memory = False

        return made

    torch.empty, torch.Tensor.new_empty = telling(empty), telling(new_empty)  # type: ignore[method-assign]
    poison.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.empty, torch.Tensor.new_empty = empty, new_empty  # type: ignore[method-assign]
        poison.fill_uninitialized_memory = before


class OnHost(TorchDispatchMode):
    """A mode that computes torch's GEMMs of half precision on a device in float32 on the host and
    copies the results. Initcheck does not see the stores of cuBLAS's kernels (by TMA, it seems),
    so their readers would be reported.

    NOTE: leaving libraries' kernels out (``--kernel-name-exclude``) makes it worse: their writes
    then do not count.
    """

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name, first = (
            dict(kwargs or {}),
            func.overloadpacket.__name__,
            args[0] if args else None,
        )
        if not (
            name in PRODUCTS
            and isinstance(first, torch.Tensor)
            and first.device.type == self._device
            and first.dtype in (torch.bfloat16, torch.float16)
        ):
            return func(*args, **kwargs)
        out = kwargs.pop("out", first if name.endswith("_") else None)
        named = [
            kwargs.pop("out_dtype", None),
            *(one for one in args if isinstance(one, torch.dtype)),
        ]
        dtype = next((one for one in named if one is not None), first.dtype)
        factors = [
            one.to("cpu").float() if isinstance(one, torch.Tensor) else one
            for one in args
            if not isinstance(one, torch.dtype)
        ]
        product = getattr(torch, name.rstrip("_"))(*factors, **kwargs).to(
            dtype if out is None else out.dtype
        )
        return product.to(first.device) if out is None else out.copy_(product)


def run_tests(file: str, tool: str, captured: bool, seconds: float) -> int:
    """Run the tests of one file in a process of its own, and print the names of the kernels they
    launch.
    """
    from triton.runtime.jit import JITFunction

    from glowplug.kernels.launch import dependent_launch as dependent

    if (
        tool == "initcheck"
    ):  # otherwise writes of a kernel are missed when the next one does not wait for all of it
        dependent.supported = lambda: False  # type: ignore[assignment]
    names: set[str] = set()
    launch = JITFunction.run

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(f"{self.fn.__module__.removeprefix(KERNELS)}.{self.fn.__name__}")
        return launch(self, *args, **kwargs)

    JITFunction.run = noting
    few = Few(seconds, captured)
    with ExitStack() as under:
        if tool == "initcheck":
            under.enter_context(only_padded_filled()), under.enter_context(OnHost())
        status = pytest.main(
            [file, "-m", "not slow", "-p", "no:cacheprovider", "--tb=short", "-rfE", "--timeout=0"],
            plugins=[few],
        )
    print(
        LAUNCHED + " ".join(sorted(names)), LEFT_OUT + " ".join(few.left_out), sep="\n", flush=True
    )
    return int(status)


# ---- outside the sanitizer -----------------------------------------------------------------------


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(PLACES)
    )
    if found is None:
        sys.exit("compute-sanitizer is not here: it comes with the CUDA toolkit")
    return found


def jobs(tools: Sequence[str], only: str) -> list[Job]:
    """Return (file, tool, the tests that capture?), the longest first."""
    files = sorted(
        (file for file in TESTS if re.search(only, file.name)),
        key=lambda file: -file.stat().st_size,
    )
    plain = [
        (file, tool, False)
        for tool in tools
        for file in files
        if not file.name.startswith(ALL_CAPTURE)
    ]
    capture = [
        (file, "memcheck", True)
        for file in files
        if any(word in file.read_text() for word in CAPTURES)
    ]
    return plain + (capture if "memcheck" in tools else [])


def sanitized(file: Path, tool: str, captured: bool, seconds: float) -> Outcome:
    """Run one file under one tool, and stop it a while after its time: a test that has begun may
    take longer than all before.
    """
    most = 3 * seconds + 60
    command = [
        sanitizer(),
        "--tool",
        tool,
        "--error-exitcode",
        str(FOUND),
        "--print-limit",
        str(PRINTED),
        "--report-api-errors",
        "no",
        sys.executable,
        "-m",
        "tests.gpu.sanitize",
        "--inside",
        str(file),
        "--seconds",
        str(seconds),
        "--tools",
        tool,
        *["--captured"] * captured,
    ]
    started = time.monotonic()
    own = {**os.environ, "CUDA_MODULE_LOADING": "LAZY"} | (
        {} if captured else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    )
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        env=own,
        start_new_session=True,
    ) as process:
        try:
            log = process.communicate(timeout=most)[0]
        except (
            subprocess.TimeoutExpired
        ):  # NOTE: ending the sanitizer alone leaves the program under it running
            os.killpg(process.pid, signal.SIGKILL)
            log = process.communicate()[0] + f"\n1 failed in {most:.0f}s: no end"
    return read(file.name, tool, log, time.monotonic() - started, captured)


def read(file: str, tool: str, log: str, seconds: float, captured: bool = False) -> Outcome:
    """Read the output of the sanitizer and of pytest."""
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", log)
    ends = "\n".join(re.findall(r"^(.*) in [\d.]+s", log, re.MULTILINE))
    counts = {
        word: sum(int(n) for n in re.findall(rf"(\d+) {word}", ends))
        for word in ("passed", "failed", "error")
    }
    kernels, left_out = (
        re.findall(rf"^{words}(.*)", log, re.MULTILINE) for words in (LAUNCHED, LEFT_OUT)
    )
    theirs = Counter(
        kernel for kernel in reported(log) if any(word in kernel for word in LIBRARIES)
    )
    errors = max(max(map(int, summary)) - theirs.total(), 0) if summary else None
    return Outcome(
        file,
        tool,
        captured,
        errors,
        counts["passed"],
        counts["failed"] + counts["error"],
        round(seconds, 1),
        tuple(kernels[-1].split()) if kernels else (),
        tuple(left_out[-1].split()) if left_out else (),
        log,
        dict(theirs),
    )


def reported(log: str) -> list[str]:
    """Return the kernel of every report without its template arguments."""
    found = re.findall(
        r"^=+ (?:Invalid|Uninitialized)[^\n]*\n=+ +at (?:void )?([^\n]*?)\+0x", log, re.MULTILINE
    )
    return [re.match(r"[\w:]*", at.replace("<unnamed>::", ""))[0] for at in found]  # type: ignore[index]


def launchable() -> list[str]:
    """Return ``module.kernel`` of every Triton kernel that no other kernel calls or passes on (as
    to a reduction).
    """
    jitted, called = set(), set()
    for path in (ROOT / "kernels").rglob("*.py"):
        module = ast.parse(path.read_text())
        home = ".".join(path.relative_to(ROOT / "kernels").with_suffix("").parts)
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}".removeprefix(KERNELS)
            for node in ast.walk(module)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        called |= set(imported.values())
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(one) for one in node.decorator_list
            ):
                jitted.add(f"{home}.{node.name}")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                first, *rest = ast.unparse(node.func).split(".")
                called.add(".".join([imported.get(first, f"{home}.{first}"), *rest]))
                called |= {
                    f"{home}.{given.id}"
                    for part in node.args
                    for given in ast.walk(part)
                    if isinstance(given, ast.Name)
                }
    return sorted(jitted - called)


def complaints(log: str) -> list[str]:
    """Return the first lines of the sanitizer's complaints."""
    lines = [
        line.removeprefix("========= ").strip()
        for line in log.splitlines()
        if line.startswith("=========")
    ]
    return [
        line
        for line in lines
        if re.match(r"Invalid|Uninitialized|Program hit|Barrier|(.* )?at .*\+0x", line)
    ][:6]


def report(outcomes: Sequence[Outcome], seconds: float, asked: Sequence[Job]) -> dict[str, Any]:
    """Return the report: ``clean`` when all ``asked`` processes ended so; ``not_run`` lists those
    that have not ended.
    """
    outcomes = sorted(outcomes, key=lambda outcome: (outcome.tool, outcome.file, outcome.captured))
    ended = {(outcome.file, outcome.tool, outcome.captured) for outcome in outcomes}
    missing = [
        (file, tool, captured)
        for file, tool, captured in asked
        if (file.name, tool, captured) not in ended
    ]
    launched = {name for outcome in outcomes for name in outcome.kernels}
    wanted = set(launchable())
    return {
        "clean": not missing and all(outcome.clean for outcome in outcomes),
        "complete": not missing,
        "not_run": [
            f"{tool} {file.name}{', captured' * captured}" for file, tool, captured in missing
        ],
        "seconds": round(seconds),
        "tools": {
            tool: {
                "tests": sum(o.passed for o in outcomes if o.tool == tool),
                "errors": sum(o.errors or 0 for o in outcomes if o.tool == tool),
                "in_libraries": dict(
                    sum((Counter(o.in_libraries) for o in outcomes if o.tool == tool), Counter())
                ),
                "files_not_clean": [o.file for o in outcomes if o.tool == tool and not o.clean],
            }
            for tool in TOOLS
            if any(o.tool == tool for o in outcomes)
        },
        "filled_under_initcheck": list(PADDED),
        "kernels": sorted(wanted & launched),
        "kernels_not_launched": sorted(wanted - launched),
        "files": [
            {
                "file": o.file,
                "tool": o.tool,
                "captured": o.captured,
                "passed": o.passed,
                "failed": o.failed,
                "errors": o.errors,
                "in_libraries": o.in_libraries,
                "seconds": o.seconds,
                "complaints": complaints(o.log),
                "left_out": list(o.left_out),
            }
            for o in outcomes
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--only", default="", help="files whose names match this")
    parser.add_argument("--jobs", type=int, default=8, help="processes that share the GPU")
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="of each file's tests; the rest is left out"
    )
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    parser.add_argument("--captured", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return run_tests(options.inside, options.tools[0], options.captured, options.seconds)
    from glowplug.entrypoints.bench.others.conditions import conditions
    from glowplug.entrypoints.bench.others.report import write_json

    started, asked = time.monotonic(), jobs(options.tools, options.only)
    said = conditions("cuda") | {
        "command": "python -m tests.gpu.sanitize " + " ".join(sys.argv[1:])
    }
    outcomes: list[Outcome] = []

    def work(job: Job) -> Outcome:
        return sanitized(*job, options.seconds)

    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(work, job) for job in asked]):
            outcomes.append(outcome := done.result())
            counts = (
                f"{outcome.passed} passed, {outcome.failed} failed, {outcome.errors} errors, "
                f"{outcome.seconds} s"
            )
            print(
                f"{outcome.tool:10} {outcome.file:36} {'captured, ' * outcome.captured}{counts}",
                *complaints(outcome.log),
                *[] if outcome.clean else outcome.log.splitlines()[-TAIL:],
                sep="\n  ",
                flush=True,
            )
            if options.output:  # written as results come: a stopped run keeps them
                write_json(
                    options.output, said | report(outcomes, time.monotonic() - started, asked)
                )
    found = report(outcomes, time.monotonic() - started, asked)
    print(
        json.dumps(
            {key: found[key] for key in ("clean", "seconds", "tools", "kernels_not_launched")}
        )
    )
    return 0 if found["clean"] else 1


if __name__ == "__main__":
    sys.exit(main())

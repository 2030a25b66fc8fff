"""Command lines that SGLang's DeepSeek pages publish, resolved to plans and run on a CPU.

A line keeps its options; only the program's name is ours. Model names are replaced by stand-ins: by
the shape of the model for the plan, and by a tiny model for the run, which has one rank.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import itertools
import json
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints.bench.load.local_server import LocalServer
from glowplug.entrypoints.bench.one_batch import static_config
from glowplug.entrypoints.cli.flags.command_line import read_command_line
from glowplug.entrypoints.cli.flags.parser import Parser
from glowplug.entrypoints.cli.main import COMMANDS, main
from glowplug.entrypoints.front.llm import LLM
from tests.support.eagle import LLAMA_1, head_config, head_tensors, write_head
from tests.support.published import LITE, V3, machine_for
from tests.support.source_tree import ROOT

#: published program -> module of ours, and the words of the command that it runs
PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "python3 -m sglang.launch_server": ("launch_server", ("serve",)),
    "python3 -m sglang.bench_one_batch": ("bench_one_batch", ("bench", "one-batch")),
    "python3 -m sglang.bench_one_batch_server": (
        "bench_one_batch_server",
        ("bench", "one-batch-server"),
    ),
    "python3 -m sglang.bench_offline_throughput": (
        "bench_offline_throughput",
        ("bench", "offline"),
    ),
    "python3 -m sglang.bench_serving": ("bench_serving", ("bench", "serving")),
    "python3 scripts/playground/bench_speculative.py": (
        "bench_speculative",
        ("bench", "speculative"),
    ),
    "python3 scripts/export_deepseek_nextn.py": ("export_deepseek_nextn", ("export-nextn",)),
    "python3 benchmark/kernels/fused_moe_triton/tuning_fused_moe_triton.py": (
        "tuning_fused_moe_triton",
        ("tune", "fused_moe_triton"),
    ),
    "python3 benchmark/kernels/quantization/tuning_block_wise_fp8.py": (
        "tuning_block_wise_fp8",
        ("tune", "block_wise_fp8"),
    ),
}
SERVER, ONE_BATCH, ONE_BATCH_SERVER, OFFLINE, SERVING, DRAFTS, EXPORT, MOE, GEMM = PROGRAMS
CLIENTS = frozenset({SERVING})  #: programs that send requests to a running server
PLANNED = frozenset({SERVER, ONE_BATCH, ONE_BATCH_SERVER, OFFLINE, DRAFTS})
TUNERS = frozenset({MOE, GEMM})
#: options that the run on a CPU leaves out, because it has one rank, with their number of values
RANK_OPTIONS = {
    **dict.fromkeys(("--tp", "--tp-size", "--dp", "--dp-size", "--ep-size"), 1),
    **dict.fromkeys(("--nnodes", "--node-rank", "--dist-init-addr"), 1),
    **dict.fromkeys(("--enable-ep-moe", "--enable-dp-attention"), 0),
}
SMALL_BATCH = {"--input": "24", "--output": "6"}


@dataclass(frozen=True)
class Published:
    """A published command line.

    Attributes:
        source: tag of the page that publishes it.
        program: the program with its interpreter, a key of ``PROGRAMS``.
        options: everything behind the program.
        smaller: option -> its value in the run on a CPU, also if the line does not have it.
    """

    source: str
    program: str
    options: str
    smaller: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        return shlex.split(self.options)

    @property
    def ours(self) -> str:
        return f"python3 -m glowplug.{PROGRAMS[self.program][0]} {self.options}".strip()


def _lines() -> Iterator[Published]:
    """Yield the published command lines."""
    v3 = "--model-path deepseek-ai/DeepSeek-V3"
    r1 = "--model-path deepseek-ai/DeepSeek-R1 --trust-remote-code --tp 16"
    two_nodes = "--dist-init-addr 10.0.0.1:5000 --nnodes 2 --node-rank 0"
    ablation = f"{r1} {two_nodes} --max-running-requests 768"
    nextn = "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"
    ep_moe = "--enable-ep-moe --ep-size 16"
    compiled = "--enable-torch-compile --torch-compile-max-bs 1"
    for options in (
        compiled,
        f"{compiled} --disable-radix-cache",
        f"{compiled} --enable-flashinfer-mla --disable-radix-cache",
        f"{compiled} --disable-cuda-graph",
        f"{compiled} --enable-dp-attention --dp-size 2 --disable-radix-cache",
        "--enable-ep-moe --disable-cuda-graph",
        f"{compiled} {ep_moe}",
        f"--speculative-algo NEXTN --speculative-draft lmsys/DeepSeek-R1-NextN {nextn} "
        f"{ep_moe} --disable-radix-cache --mem-fraction-static 0.7",
        f"{ep_moe} --enable-dp-attention --dp-size 16 --enable-flashinfer-mla",
        f"--speculative-algorithm NEXTN {nextn} {ep_moe} --enable-dp-attention --dp-size 2",
    ):
        yield Published("S0", SERVER, f"{ablation} {options}")
    batch = f"--batch-size 1 --input 256 --output 32 {v3} --trust-remote-code --tp 8"
    for options in (
        "--torch-compile-max-bs 1 --disable-cuda-graph --profile",
        "--torch-compile-max-bs 1 --disable_cuda_graph --profile",
        "--torch-compile-max-bs 1 --cuda-graph-max-bs 1 --profile",
        "--enable-torch-compile --torch-compile-max-bs 1 --cuda-graph-max-bs 1",
        "--cuda-graph-bs 1 2 4",
    ):
        yield Published("S1", ONE_BATCH, f"{batch} {options}", SMALL_BATCH)
    for options in (
        "--tp 8 --trust-remote-code --enable-flashinfer-mla --disable-radix-cache",
        "--tp 8 --trust-remote-code --enable-dp-attention --dp-size 8",
        "--tp 8 --trust-remote-code --disable-overlap-schedule",
        "--tp 8 --trust-remote-code --speculative-algo NEXTN --speculative-draft "
        "SGLang/DeepSeek-V3-NextN --speculative-num-steps 2 --speculative-eagle-topk 4 "
        "--speculative-num-draft-tokens 4 --disable-radix-cache",
    ):
        yield Published("S1", SERVER, f"{v3} {options}")
    random = "--dataset-name random --random-range-ratio 1"
    small = {"--random-input": "16", "--random-output": "4", "--num-prompts": "2"}
    yield Published(
        "S1",
        SERVING,
        f"--backend sglang {random} --random-input 256 --random-output 256 --num-prompts 1 "
        "--max-concurrency 1 --host 127.0.0.1 --port 30000 --output-file deepseekv3_nextn.jsonl",
        small,
    )
    yield Published(
        "S1", MOE, "--model deepseek-ai/DeepSeek-V3 --tp-size 8 --dtype fp8_w8a8 --tune"
    )
    yield Published("S1", GEMM, "")
    yield from _usage_lines(v3, two_nodes)
    for levels in ("5 --max-concurrency 1", "160 --max-concurrency 32"):
        yield Published(
            "S4",
            SERVING,
            f"--backend sglang-oai {random} --random-input-len 1000 --random-output-len 1000 "
            f"--num-prompts {levels} --host 127.0.0.1 --port 30000",
            {"--random-input-len": "16", "--random-output-len": "4", "--num-prompts": "4"},
        )
    eagle = "--attention-backend fa3 --speculative-algorithm EAGLE"
    for knobs in ("3 1 4", "5 4 8"):
        steps, topk, tokens = knobs.split()
        yield Published(
            "S4",
            SERVER,
            f"--model deepseek-ai/DeepSeek-V3-0324 --tp 8 --trust-remote-code {eagle} "
            f"--speculative-num-steps {steps} --speculative-eagle-topk {topk} "
            f"--speculative-num-draft-tokens {tokens}",
        )
    yield Published(
        "S4",
        SERVER,
        f"--model meta-llama/Meta-Llama-3-8B-Instruct --dtype float16 {eagle} "
        "--speculative-draft-model-path lmsys/sglang-EAGLE-LLaMA3-Instruct-8B "
        "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3",
    )
    for model in ("deepseek-ai/DeepSeek-V2-Lite", "None --base-url http://127.0.0.1:30000"):
        yield Published(
            "SGLang",
            ONE_BATCH_SERVER,
            f"--model {model} --batch-size 1 16 --input-len 1024 --output-len 8",
            {"--input-len": "24", "--output-len": "4"},
        )
    yield Published(
        "SGLang",
        OFFLINE,
        f"--model-path deepseek-ai/DeepSeek-V2-Lite {random} --random-input 1024 "
        "--random-output 1024 --num-prompts 10",
        small,
    )


def _usage_lines(v3: str, two_nodes: str) -> Iterator[Published]:
    """Yield the command lines of S2 and S3, the usage page and its slides."""
    usage = f"{v3} --trust-remote-code"
    for options in (
        f"{usage} --tp 8 --host 0.0.0.0 --port 30000",
        f"{usage} --tp 16 {two_nodes}",
        f"{usage} --tp 8 --disable-mla",
        f"{usage} --tp 8 --enable-torch-compile --torch-compile-max-bs 8",
        f"{usage} --tp 8 --dist-timeout 3600",
        f"{usage} --tp 8 --quantization fp8 --kv-cache-dtype fp8_e5m2",
        f"{usage} --tp 8 --quantization fp8",
        "--model-path deepseek-ai/DeepSeek-V2-Lite --trust-remote-code --quantization fp8 "
        "--kv-cache-dtype fp8_e5m2",
        "--model-path deepseek-ai/DeepSeek-V2-Lite --trust-remote-code --quantization fp8",
        "--model-path meta-llama/Meta-Llama-3-8B-Instruct --kv-cache-dtype fp8_e5m2",
        f"{usage} --tp 8 --speculative-algorithm EAGLE --speculative-draft-model-path "
        "lmsys/DeepSeek-V3-NextN --speculative-num-steps 1 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 2",
    ):
        yield Published("S2", SERVER, options)
    yield Published(
        "S2", EXPORT, "--input-dir deepseek-ai/DeepSeek-V3 --output-dir DeepSeek-V3-NextN"
    )
    yield Published(
        "S2",
        DRAFTS,
        f"{usage} --tp-size 8 --speculative-algorithm EAGLE --batch-size 1 --steps 1 --topk 1 "
        "--num_draft_tokens 2",
        {"--output-len": "8"},
    )


LINES = tuple(_lines())


# ---- stand-ins -----------------------------------------------------------------------------------

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128009,
}


@cache
def plugins() -> PluginSet:
    return load_plugins(entry_points=False)


def _written(folder: Path, config: Mapping[str, Any]) -> str:
    """Write config.json to a new folder and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@cache
def stand_ins() -> tuple[dict[str, str], dict[str, str]]:
    """Return, by part of a model's name, its stand-in for plans and that for runs on a CPU.

    Names of drafts come before those of the models.
    """
    folder = Path(tempfile.mkdtemp(prefix="glowplug-published-"))
    shape = json.loads((ROOT / V3).read_text())
    alone = {**shape, "architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1}
    tiny = json.loads((ROOT / "models" / "shapes" / "tiny-llama.json").read_text())
    head = head_config(tiny, LLAMA_1)
    write_head(folder / "tiny-head", head, head_tensors(head))
    with contextlib.redirect_stdout(io.StringIO()):
        exported = ["--input-dir", "embedded", "--output-dir", str(folder / "tiny-nextn")]
        assert main(["export-nextn", *exported]) == 0
    planned = {
        "NextN": _written(folder / "nextn", {**alone, "first_k_dense_replace": 0}),
        "EAGLE-LLaMA3": _written(folder / "head", head_config(LLAMA_3_8B, LLAMA_1)),
        "Llama-3-8B": _written(folder / "llama", LLAMA_3_8B),
        "V2-Lite": str(ROOT / LITE),
        "DeepSeek": str(ROOT / V3),
    }
    run = {
        "NextN": str(folder / "tiny-nextn"),
        "EAGLE-LLaMA3": str(folder / "tiny-head"),
        "Llama-3-8B": str(ROOT / "models" / "shapes" / "tiny-llama.json"),
        "V2-Lite": str(ROOT / "models" / "shapes" / "tiny-v2.json"),
        "DeepSeek": "embedded",
    }
    return planned, run


def replaced(words: Sequence[str], models: Mapping[str, str]) -> list[str]:
    """Return the words with each model's name replaced by its stand-in."""
    return [
        next((models[part] for part in models if part in word and "/" in word), word)
        for word in words
    ]


def small_words(line: Published) -> list[str]:
    """Return the words for a run on a CPU: with a tiny model, smaller numbers, and one rank."""
    words = replaced(line.words, stand_ins()[1])
    kept: list[str] = []
    skipped = 0
    for at, word in enumerate(words):
        if skipped or word in RANK_OPTIONS:
            skipped = skipped - 1 if skipped else RANK_OPTIONS[word]
        else:
            kept.append(line.smaller.get(words[at - 1], word) if at else word)
    added = [(name, value) for name, value in line.smaller.items() if name not in kept]
    return [*kept, *itertools.chain.from_iterable(added)]


# ---- plans ---------------------------------------------------------------------------------------


def parsed(line: Published, words: Sequence[str]) -> Any:
    """Return the options of a line, parsed by the parser of the command that the program runs."""
    name, *rest = PROGRAMS[line.program][1]
    parser = Parser(prog=f"glowplug {name}")
    importlib.import_module(COMMANDS[name].module).configure(parser)
    return parser.parse_args([*rest, *words])


def plan_of(line: Published) -> EnginePlan:
    """Return the plan of a line on the smallest sheet with enough GPUs of the kind H200.

    Raises:
        ConfigError, PlanRefused: see ``make_plan``.
    """
    words = replaced(line.words, stand_ins()[0])
    with tempfile.NamedTemporaryFile(suffix=".json") as sheet:
        Path(sheet.name).write_bytes(msgspec.json.encode(machine_for(words)))
        args = parsed(line, [*words, "--facts", sheet.name, "--load-format", "dummy"])
        given = read_command_line(args, plugins())
    if line.program != ONE_BATCH:
        return given.plan()
    shape = (args.batch_size[0], args.input_len[0], args.output_len[0])
    positions = plugins().read_model(given.config["model"]).facts.max_positions
    return make_plan(
        static_config(given.config, [shape], positions),
        source="the command line",
        origins=given.layer.origins,
        plugins=plugins(),
        hardware=given.hardware,
        prior=given.layer.refusals,
        notes=given.notes,
    )


def summary(plan: EnginePlan) -> str:
    """Return the main choices of a plan as one line."""
    names = [plan.choice(slot).name for slot in ("attention", "quantization", "graphs")]
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1)
    shape = plan.sizes.draft_shape
    drafts = f"; drafts {shape.steps}/{shape.topk}/{shape.tokens}" if plan.sizes.width > 1 else ""
    ranks = f"{plan.ranks} ranks ({mesh})" if plan.ranks > 1 else "1 rank"
    return f"{ranks}; {', '.join(names)}{drafts}{_remarks(plan)}"


def _remarks(plan: EnginePlan) -> str:
    """Return the decisions that say that something given has no effect, or is taken otherwise."""
    idle = [one.field for one in plan.decisions if one.value == "no effect"]
    idle += [one.field for one in plan.decisions if "no effect: " in one.why]
    taken = [one.value for one in plan.decisions if one.field == "quantization.weights"]
    return "".join(
        [
            f"; no effect: {', '.join(dict.fromkeys(idle))}" if idle else "",
            f"; weights {taken[0]}" if taken else "",
        ]
    )


def refused_text(refusals: Sequence[Refusal]) -> str:
    """Return refused fields with their fixes."""
    return "refused: " + "; ".join(f"`{one.field}`, fix: `{one.fix}`" for one in refusals)


def refused_fields(fields: Iterable[str]) -> str:
    """Return refused fields, each once."""
    return "refused: " + ", ".join(f"`{one}`" for one in sorted(set(fields)))


def planned_text(line: Published) -> str:
    """Return what the plan of a line is: its choices, its refusals, or its tables to tune."""
    if line.program in TUNERS:
        status, output = run_main(
            [*PROGRAMS[line.program][1], *_untuned(line), "--device", "cpu", "--list"]
        )
        assert status == 0, output
        labels = re.findall(r"^(\S+): 0 of", output, re.MULTILINE)
        return f"tables {', '.join(labels)}"
    if line.program not in PLANNED or "--base-url" in line.words:
        return "needs no plan"
    try:
        return summary(plan_of(line))
    except PlanRefused as error:
        return refused_text(error.refusals)


def _untuned(line: Published) -> list[str]:
    """Return the words of a tuner's line without the switch to measure."""
    return [word for word in replaced(line.words, stand_ins()[0]) if word != "--tune"]


# ---- runs ----------------------------------------------------------------------------------------


def run_main(words: Sequence[str]) -> tuple[int, str]:
    """Run a command in this process and return its exit status and what it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            status = main(list(words))
        except SystemExit as error:
            status = int(error.code or 0)
    return status, output.getvalue()


def run_text(line: Published) -> str:
    """Run a line on a CPU in an empty folder and return what happened.

    Raises:
        AssertionError: the line was neither run nor refused by the plan.
    """
    with empty_folder() as folder, contextlib.chdir(folder):
        return _served(line) if line.program == SERVER else _commanded(line)


def _served(line: Published) -> str:
    """Run a server's line by the engine in this process, and generate a few tokens."""
    words = [*small_words(line), "--device", "cpu"]
    model = words[words.index("--model-path" if "--model-path" in words else "--model") + 1]
    if model != "embedded":
        words += ["--load-format", "dummy", "--skip-tokenizer-init"]
    given = read_command_line(parsed(line, words), plugins())
    try:
        given.plan({"executor.use": "inline"})
        with LLM(**given.config) as llm:
            tokens = llm.generate([[5, 6, 7]])[0].token_ids
            assert tokens
            return "runs"
    except PlanRefused as error:
        return refused_fields(one.field for one in error.refusals)


def _commanded(line: Published) -> str:
    """Run a line of another program than the server."""
    words = small_words(line)
    command = PROGRAMS[line.program][1]
    if line.program in TUNERS:
        status, output = run_main([*command, *words, "--device", "cpu"])
        assert status == 2 and "measures on cuda" in output, output
        return "refused: measures on a GPU (--list shows the tables)"
    if line.program in CLIENTS or "--base-url" in words:
        return _status(run_main([*command, *pointed(words)]))
    if line.program != EXPORT:
        words += ["--device", "cpu"]
        if "embedded" not in words:
            words += ["--load-format", "dummy", "--skip-tokenizer-init"]
    return _status(run_main([*command, *words]))


@cache
def server() -> LocalServer:
    """Start a server of the embedded model, which runs until this process ends."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(LocalServer({"model": "embedded"}))


def pointed(words: Sequence[str]) -> list[str]:
    """Return the words of a client with the address of the server."""
    port = str(server().port)
    moved = [port if words[at - 1] == "--port" else word for at, word in enumerate(words)]
    return [word.replace(":30000", f":{port}") for word in moved]


def _status(done: tuple[int, str]) -> str:
    """Return "runs", or the fields of the plan's refusals."""
    status, output = done
    fields = re.findall(r"^ \d+\. (\S+): ", output, re.MULTILINE)
    if status == 0:
        return "runs"
    assert status == 2 and fields, output
    return refused_fields(fields)


def empty_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder for a run."""
    return tempfile.TemporaryDirectory(prefix="glowplug-run-")

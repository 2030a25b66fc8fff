"""Prometheus metrics named ``glowplug:...``, with vLLM's names after the prefix.

``metrics.compat`` exports series a second time, under the names of other engines
(``compat_names.py``).

The registry is our own: counters, gauges and histograms with fixed labels, without a client
library. Label values never come from a user.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from glowplug.core.config.operation_options import MetricsOptions
from glowplug.core.step.messages import Stats
from glowplug.entrypoints.front.delta import Times
from glowplug.entrypoints.server.compat_names import COMPAT
from glowplug.entrypoints.server.metric_names import (
    BY_GROUP,
    ITL_EDGES,
    LABELLED_SERIES,
    LATENCY_EDGES,
    LENGTH_EDGES,
    N_EDGES,
    STATS_SERIES,
    TTFT_EDGES,
)

Labels = tuple[str, ...]
Sample = tuple[str, str, float]  #: suffix of the name, rendered labels, value


def _render(names: Sequence[str], values: Sequence[str]) -> str:
    pairs = (f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))
    return ",".join(pairs)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Counter:
    """A counter with one value for each combination of label values."""

    kind = "counter"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.help = help
        self.labels = tuple(labels)
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def inc(self, amount: float = 1.0, labels: Labels = ()) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def samples(self) -> Iterator[Sample]:
        for labels, value in self.values.items():
            yield "", _render(self.labels, labels), value


class Histogram:
    """A histogram without labels. ``edges``: upper bounds of its buckets, ascending."""

    kind = "histogram"

    def __init__(self, name: str, help: str, edges: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value

    def samples(self) -> Iterator[Sample]:
        total = 0
        for edge, count in zip((*self.edges, None), self.counts, strict=True):
            total += count
            yield "_bucket", f'le="{"+Inf" if edge is None else edge}"', total
        yield "_sum", "", self.sum
        yield "_count", "", total


class EngineSeries:
    """A gauge or counter whose value comes from the engine's statistics.

    At each scrape ``value`` computes the sample from the latest statistics.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        help: str,
        value: Callable[[Stats], float],
        stats: Callable[[], Stats],
    ) -> None:
        self.name = name
        self.kind = kind
        self.help = help
        self._value = value
        self._stats = stats

    def samples(self) -> Iterator[Sample]:
        yield "", "", self._value(self._stats())


class GroupSeries:
    """A gauge with one value for each data-parallel group, labelled with the group's number.

    With a single group the gauge has no samples.
    """

    kind = "gauge"

    def __init__(
        self,
        name: str,
        help: str,
        value: Callable[[Stats], float],
        groups: Callable[[], Sequence[Stats]],
    ) -> None:
        self.name = name
        self.help = help
        self._value = value
        self._groups = groups

    def samples(self) -> Iterator[Sample]:
        groups = self._groups()
        for stats in groups if len(groups) > 1 else ():
            yield "", f'group="{stats.group}"', self._value(stats)


class LabelledSeries:
    """A counter with one label, whose values come from the engine's statistics."""

    kind = "counter"

    def __init__(
        self,
        name: str,
        help: str,
        label: str,
        values: Callable[[Stats], list[tuple[str, float]]],
        stats: Callable[[], Stats],
    ) -> None:
        self.name = name
        self.help = help
        self._label = label
        self._values = values
        self._stats = stats

    def samples(self) -> Iterator[Sample]:
        for of, value in self._values(self._stats()):
            yield "", _render((self._label,), (of,)), value


Metric = Counter | Histogram | EngineSeries | GroupSeries | LabelledSeries
M = TypeVar("M", Counter, Histogram, EngineSeries, GroupSeries, LabelledSeries)


class Metrics:
    """All metrics of the server.

    Args:
        model: value of the label ``model_name``.
        stats: returns the engine's latest statistics over all groups.
        options: section ``metrics`` of the configuration.
        groups: returns the latest statistics of each data-parallel group.
    """

    def __init__(
        self,
        model: str,
        stats: Callable[[], Stats],
        options: MetricsOptions,
        groups: Callable[[], Sequence[Stats]],
    ) -> None:
        self._model = model
        self._options = options
        self._all: dict[str, Metric] = {}
        self._add_times()
        self._add_lengths()
        self._add_counters()
        for name, kind, help, value in STATS_SERIES:
            self._add(EngineSeries(name, kind, help, value, stats))
            if name in BY_GROUP:
                group_help = f"{help} One data-parallel group."
                self._add(GroupSeries(f"group_{name}", group_help, value, groups))
        for name, help, label, values in LABELLED_SERIES:
            self._add(LabelledSeries(name, help, label, values, stats))

    def _add_times(self) -> None:
        """Add the histograms of times, in seconds."""
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT_EDGES
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Between tokens of one sequence.", ITL_EDGES
        )
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Decode time per output token.", ITL_EDGES
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", LATENCY_EDGES
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From arrival in the engine to admission.", LATENCY_EDGES
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From admission to the first token.", LATENCY_EDGES
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", LATENCY_EDGES
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "From admission to the last token.", LATENCY_EDGES
        )

    def _add_lengths(self) -> None:
        """Add the histograms of token counts and of the parameters ``max_tokens`` and ``n``.

        The token counts are those of prompts and outputs; ``n`` is the number of choices.
        """
        self.prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request.", LENGTH_EDGES
        )
        self.output_length = self._histogram(
            "request_generation_tokens", "Output tokens per request.", LENGTH_EDGES
        )
        self.max_tokens = self._histogram(
            "request_params_max_tokens", "The requested max_tokens.", LENGTH_EDGES
        )
        self.n = self._histogram("request_params_n", "The requested n.", N_EDGES)

    def _add_counters(self) -> None:
        """Add the counters of tokens and requests."""
        self.prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens of served sequences."
        )
        self.cached_tokens = self._counter(
            "cached_tokens_total", "Prompt tokens found in the prefix cache."
        )
        self.output_tokens = self._counter("generation_tokens_total", "Tokens generated.")
        self.requests = self._counter("num_requests_total", "Requests admitted by the server.")
        self.sequences = self._counter(
            "num_sequences_total", "Sequences that have ended, by any reason."
        )
        self.success = self._counter(
            "request_success_total", "Sequences by finish reason.", "finished_reason"
        )
        self.rejected = self._counter(
            "requests_rejected_total", "Requests answered with an error.", "status"
        )
        self.disconnected = self._counter(
            "requests_disconnected_total", "Disconnects before the end of a response."
        )
        self._http = self._counter(
            "http_requests_total", "HTTP requests.", "handler", "method", "status"
        )
        self._http_seconds = self._counter(
            "http_request_seconds_total", "Time in HTTP requests.", "handler"
        )

    def _histogram(self, name: str, help: str, edges: Sequence[float]) -> Histogram:
        return self._add(Histogram(name, help, edges))

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return self._add(Counter(name, help, labels))

    def _add(self, metric: M) -> M:
        self._all[metric.name] = metric
        return metric

    def __iter__(self) -> Iterator[Metric]:
        """Iterate over the metrics in the order of the text."""
        return iter(self._all.values())

    @property
    def enabled(self) -> bool:
        return self._options.enabled

    def phases(self, times: Times) -> None:
        """Add the time of each phase that a sequence has reached to the phase's histogram."""
        if times.queue is not None:
            self._queue.observe(times.queue)
        if times.prefill is not None and times.decode is not None:
            self._prefill.observe(times.prefill)
            self._decode.observe(times.decode)
            self._inference.observe(times.prefill + times.decode)

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an answered HTTP request. ``handler``: path of its route."""
        known = (
            method
            if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "WEBSOCKET")
            else "other"
        )
        self._http.inc(labels=(handler, known, str(status)))
        self._http_seconds.inc(seconds, (handler,))

    def text(self) -> str:
        """Return all metrics in the Prometheus text format, version 0.0.4."""
        lines: list[str] = []
        for name, metric in self._all.items():
            self._write(lines, f"glowplug:{name}", metric, {})
        for prefix in self._options.prefixes:
            for series in COMPAT[prefix]:
                metric = self._all[series.ours]
                self._write(lines, f"{prefix}:{series.name}", metric, series.labels)
        return "\n".join(lines) + "\n"

    def _write(
        self, lines: list[str], name: str, metric: Metric, more_labels: Mapping[str, str]
    ) -> None:
        """Add the lines of one metric. ``more_labels``: labels of all its samples."""
        lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
        common = _render(("model_name", *more_labels), (self._model, *more_labels.values()))
        for suffix, labels, value in metric.samples():
            joined = f"{common},{labels}" if labels else common
            lines.append(f"{name}{suffix}{{{joined}}} {value:.17g}")

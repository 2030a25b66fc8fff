"""Flags of the server, the logs and the metrics."""

from __future__ import annotations

from glowplug.entrypoints.cli.flags.flag import Flag, switch, text_list

SERVER_FLAGS: tuple[Flag, ...] = (
    Flag(("--host",), "server.host", "address to listen on (default 127.0.0.1)"),
    Flag(("--port",), "server.port", "port (default 30000)", int),
    Flag(("--api-key",), "server.api_key", "bearer token that clients must send"),
    Flag(("--admin-api-key",), "server.admin_api_key", "bearer token for the admin routes"),
    Flag(("--served-model-name",), "server.served_model_name", "name of the model in /v1/models"),
    Flag(
        ("--shutdown-timeout",),
        "server.drain_timeout",
        "seconds that running requests may take to finish after SIGTERM",
        float,
    ),
    Flag(
        ("--allowed-origins",),
        "server.cors_origins",
        "JSON list of origins that browsers may send requests from (CORS)",
        text_list,
    ),
    Flag(("--stream-interval",), "server.stream_interval", "tokens per event of a stream", int),
    Flag(
        ("--reasoning-parser",),
        "outputs[*].use",
        "parser that separates the reasoning from the answer: deepseek-r1",
    ),
    Flag(
        ("--tool-call-parser",),
        "outputs[*].use",
        "parser of tool calls, such as deepseek_v3, kimi_k2 or hermes; replaces the default of the "
        "model, and so does --reasoning-parser",
    ),
    Flag(("--log-level",), "log.level", "debug, info, warning, error"),
    Flag(("--log-format",), "log.format", "human or json"),
    switch("--disable-log-stats", "log.stats_interval", 0.0, "do not log statistics"),
    switch(
        "--log-requests --enable-log-requests",
        "log.requests",
        True,
        "log each request (the default)",
    ),
    switch(
        "--disable-log-requests --no-enable-log-requests",
        "log.requests",
        False,
        "do not log each request",
    ),
    Flag(
        ("--watchdog-timeout",),
        "executor.watchdog",
        "seconds without a heartbeat before a rank counts as hung",
        float,
    ),
    switch(
        "--enable-tokenizer-info-endpoint",
        "server.tokenizer_info",
        True,
        "serve /tokenizer_info (the default)",
    ),
    switch(
        "--no-enable-tokenizer-info-endpoint",
        "server.tokenizer_info",
        False,
        "do not serve /tokenizer_info",
    ),
    switch("--enable-metrics", "metrics.enabled", True, "serve Prometheus metrics (the default)"),
)

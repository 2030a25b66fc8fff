"""The routes beside generation: text, models, information, the schema, browsers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import jsonschema
import pytest

from glowplug import __version__
from glowplug.core.facts.expert_load import ExpertLoad
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.front.client import EngineClient
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.refused import REASONS
from glowplug.entrypoints.server.routes import ROUTES
from tests.e2e.fake_engine import TEMPLATE, make_plan, make_tokenizer
from tests.e2e.serving import HTTP, Served, served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(server={"api_key": "the-secret", "served_model_name": "shown"}) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer the-secret"}) as one:
        yield one


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_back(client: httpx.Client, prefix: str) -> None:
    text = "hé🗼<eos>"
    answer = client.post(
        prefix + "/tokenize", json={"prompt": text, "return_token_strs": True}
    ).json()
    assert (
        answer["tokens"] == [*"hé🗼".encode(), 257]
        and answer["count"] == 8
        and answer["max_model_len"] == 4096
    )
    assert (
        answer["token_strs"][0] == "h"
        and answer["token_strs"][-1] == "<eos>"
        and len(answer["token_strs"]) == 8
    )
    back = client.post(prefix + "/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text, "text": text}
    plain = client.post(
        prefix + "/detokenize", json={"tokens": answer["tokens"], "skip_special_tokens": True}
    ).json()
    assert plain["text"] == "hé🗼"


def test_tokenize_renders_messages(client: httpx.Client) -> None:
    messages = [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "U"}]},
    ]
    for generation, tail in ((True, [259]), (False, [])):
        answer = client.post(
            "/tokenize", json={"messages": messages, "add_generation_prompt": generation}
        ).json()
        assert answer["tokens"] == [256, 260, ord("S"), 258, ord("U"), *tail]


def test_text_routes_refuse_nonsense(client: httpx.Client) -> None:
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [9999]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/tokenize", {"prompt": "x" * (16 * 4096 + 1)}),
    ):
        assert client.post(path, json=body).status_code == 400
    assert client.post("/tokenize", json={"prompt": "x", "model": "other"}).status_code == 404
    assert client.post("/detokenize", json={"tokens": []}).json()["text"] == ""


def test_every_name_of_the_model_is_taken(client: httpx.Client) -> None:
    for name in ("shown", "/models/fake", "default", None):
        body = {"prompt": "say:x", "max_tokens": 4, **({"model": name} if name else {})}
        assert client.post("/v1/completions", json=body).json()["model"] == "shown"


def test_information_has_the_plan_and_no_secret(client: httpx.Client) -> None:
    for path in (
        "/server_info",
        "/get_server_info",
        "/model_info",
        "/get_model_info",
        "/v1/models",
        "/version",
    ):
        answer = client.get(path)
        assert (
            answer.status_code == 200
            and "the-secret" not in answer.text
            and "/models/fake" not in answer.text
        )
    info = client.get("/server_info").json()
    assert info["version"] == client.get("/version").json()["version"] == __version__
    assert (
        info["stats"]["pages_total"] == 4096
        and info["groups"] == []
        and info["engine"] == {"kv_bytes": 1 << 20}
    )
    assert (
        info["sizes"]["context_length"]
        == client.get("/model_info").json()["context_length"]
        == 4096
    )


def test_answers_match_the_declared_schema(client: httpx.Client) -> None:
    """Every GET route that needs no parameter answers as ``/openapi.json`` declares."""
    schema = client.get("/openapi.json").json()
    checked = 0
    for path, operations in schema["paths"].items():
        if "get" not in operations or "{" in path or "profile" in path or path == "/expert_load":
            continue
        answer = client.get(path)
        assert answer.status_code == 200, (path, answer.text)
        declared = operations["get"]["responses"]["200"]["content"]
        media = answer.headers["content-type"].partition(";")[0]
        assert list(declared) == [media], path
        if media == "application/json":
            wanted = {**declared["application/json"]["schema"], "components": schema["components"]}
            jsonschema.validate(answer.json(), wanted)
            checked += 1
    assert checked >= 10


@pytest.mark.parametrize(
    ("route", "prompt"), [("/generate", "text"), ("/v1/completions", "prompt")]
)
def test_requests_without_a_limit_get_the_configured_one(route: str, prompt: str) -> None:
    """The limit also fits a context that is shorter than the route's own default."""

    def length(url: str, text: str) -> int:
        body = {prompt: f"say:{text}", "ignore_eos": True}
        params = {"sampling_params": {"ignore_eos": True}} if route == "/generate" else {}
        answer = HTTP.post(url + route, json={**body, **params})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        if route == "/generate":
            return int(found["meta_info"]["completion_tokens"])
        return int(found["usage"]["completion_tokens"])

    with served(context=32) as one:
        assert length(one.url, "x" * 20) == 32 - len("say:") - 20
    with served(context=32, server={"default_max_tokens": 3}) as one:
        assert length(one.url, "x") == 3


def test_the_load_of_experts_is_summed_over_ranks(server: Served, client: httpx.Client) -> None:
    """The answer is a file for ``placement``; without counts there is none."""
    missing = client.get("/expert_load")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "expert_load_off"
    server.executor.loads = [{"a.mlp": [1, 2], "b.mlp": [3, 4]}, {"a.mlp": [5, 0], "b.mlp": [0, 1]}]
    load = ExpertLoad.model_validate_json(client.get("/expert_load").content, strict=True)
    assert (load.model, load.architecture) == ("shown", "Fake")
    assert load.layers == {"a.mlp": (6, 2), "b.mlp": (3, 5)}
    assert client.get("/reset_expert_load").status_code == 405
    assert client.post("/reset_expert_load").json()["success"]
    again = ExpertLoad.model_validate_json(client.get("/expert_load").content)
    assert again.layers == {"a.mlp": (0, 0), "b.mlp": (0, 0)}
    server.executor.loads = []


def test_the_schema_has_every_route_and_its_bounds(client: httpx.Client) -> None:
    schema = client.get("/openapi.json").json()
    assert {
        (method.upper(), path)
        for path, operations in schema["paths"].items()
        for method in operations
    } == {(method, route.path.replace(":path", "")) for route in ROUTES for method in route.methods}
    chat = schema["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["n"]["anyOf"][0] | {"maximum": 128, "minimum": 1} == chat["n"]["anyOf"][0]
    posted = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]
    assert posted == {"$ref": "#/components/schemas/ChatRequest"}
    assert "422" not in schema["paths"]["/v1/chat/completions"]["post"]["responses"]
    identifiers = [
        operation["operationId"] for path in schema["paths"].values() for operation in path.values()
    ]
    assert len(identifiers) == len(set(identifiers))


def test_browsers_are_let_in_only_when_configured(client: httpx.Client) -> None:
    asks = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    closed = client.options("/v1/chat/completions", headers=asks)
    assert closed.status_code == 405 and "access-control-allow-origin" not in closed.headers
    with served(server={"cors_origins": ["https://example.org"]}) as one:
        opened = httpx.options(one.url + "/v1/chat/completions", headers=asks)
        assert opened.headers["access-control-allow-origin"] == "https://example.org"
        other = httpx.options(
            one.url + "/v1/chat/completions", headers={**asks, "Origin": "https://evil.org"}
        )
        assert "access-control-allow-origin" not in other.headers


def system_fingerprint(**config: dict[str, object]) -> str:
    """Return the fingerprint that a server with this configuration puts into every form of
    answer.
    """
    messages = [{"role": "user", "content": "say:x"}]
    bodies = (
        ("/v1/completions", {"prompt": "say:x"}),
        ("/v1/chat/completions", {"messages": messages}),
    )
    with (
        served(**config) as server,
        httpx.Client(base_url=server.url, headers={"Authorization": "Bearer k"}) as one,
    ):
        found = {one.get("/server_info").json()["system_fingerprint"]}
        for route, body in bodies:
            found.add(one.post(route, json={**body, "max_tokens": 2}).json()["system_fingerprint"])
            stream = one.post(route, json={**body, "max_tokens": 2, "stream": True}).text
            found |= set(re.findall(r'"system_fingerprint": ?"([^"]+)"', stream))
    assert len(found) == 1 and re.fullmatch("fp_[0-9a-f]{10}", min(found))
    return min(found)


def test_the_system_fingerprint_follows_the_configuration_and_not_the_keys() -> None:
    plain = system_fingerprint()
    assert (
        system_fingerprint(
            server={"api_key": "k", "served_model_name": "b"}, log={"level": "error"}
        )
        == plain
    )
    assert system_fingerprint(server={"default_max_tokens": 3}) != plain


def test_the_system_fingerprint_follows_the_tokenizer_and_its_template() -> None:
    tokenizer, other = make_tokenizer(), make_tokenizer()
    assert tokenizer.digest == other.digest
    templated = Tokenizer(
        other.backend,
        chat_template=TEMPLATE + " ",
        special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"},
    )
    found = [
        Context.of(make_plan(), EngineClient(make_plan(), one, ()), one, ()).fingerprint
        for one in (tokenizer, other, templated, None)
    ]
    assert found[0] == found[1] and len(set(found)) == 3


def test_routes_for_other_models_are_refused_with_the_reason(
    server: Served, client: httpx.Client
) -> None:
    """The status is below 500, because clients repeat requests that are answered 5xx."""
    assert {"/v1/embeddings", "/v1/score", "/v1/rerank"} < REASONS.keys()
    for path, reason in REASONS.items():
        answer = client.post(path, json={"input": "x"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_route")
        assert error["type"] == "invalid_request_error" and reason in error["message"]
        assert httpx.post(server.url + path, json={}).status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/load_lora_adapter_from_tensors",
        "/update_weights_from_disk",
        "/collective_rpc",
    ],
)
def test_routes_that_would_change_the_model_do_not_exist(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json={"lora_name": "a", "lora_path": "/etc/passwd"})
    assert answer.status_code == 404 and "no such route" in answer.json()["error"]["message"]
    assert "passwd" not in answer.text

"""``/tokenizer_info`` and the text routes as lm-evaluation-harness' ``tokenizer_backend=remote``
reads them.
"""

from __future__ import annotations

import json

import httpx
import jinja2
import pytest

from tests.e2e.fake_engine import BOS, EOS, TEMPLATE, make_tokenizer
from tests.e2e.serving import served

KEY = {"Authorization": "Bearer the-secret"}


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenizer_info_has_the_fields_of_a_tokenizer_config(prefix: str) -> None:
    with served(server={"api_key": "the-secret"}) as one:
        answer = httpx.get(f"{one.url}{prefix}/tokenizer_info", headers=KEY)
        assert answer.status_code == 200
        assert answer.json() == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": None,
            "add_bos_token": False,
            "model_max_length": 4096,
            "chat_template": TEMPLATE,
        }
        assert "/models/" not in answer.text


def test_tokenizer_info_needs_the_key() -> None:
    with served(server={"api_key": "the-secret"}) as one:
        assert httpx.get(one.url + "/tokenizer_info").status_code == 401


def test_tokenizer_info_can_be_switched_off() -> None:
    with served(server={"tokenizer_info": False}) as one:
        answer = httpx.get(one.url + "/tokenizer_info")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "tokenizer_info_off"
        assert "server.tokenizer_info" in answer.json()["error"]["message"]


def test_tokenizer_info_without_a_tokenizer() -> None:
    with served(tokenizer=False) as one:
        answer = httpx.get(one.url + "/tokenizer_info")
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_tokenizer"


def test_a_remote_tokenizer_encodes_decodes_and_renders() -> None:
    """The requests are those of lm_eval.utils.RemoteTokenizer, 0.4.13: fields sent and fields
    read.
    """
    with (
        served() as one,
        httpx.Client(base_url=one.url, headers={"Content-Type": "application/json"}) as client,
    ):
        info = client.get("/tokenizer_info").json()

        def encode(text: str) -> list[int]:
            body = {"prompt": text, "add_special_tokens": False}
            return list(client.post("/tokenize", json=body).json()["tokens"])

        assert encode(info["eos_token"])[0] == EOS and encode(info["bos_token"])[0] == BOS
        ids = encode("hé <eos>")
        assert ids == make_tokenizer().encode("hé <eos>", add_special_tokens=False)
        assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "hé <eos>"
        messages = [{"role": "user", "content": "hi"}]
        rendered = (
            jinja2.Environment()
            .from_string(info["chat_template"])
            .render(messages=messages, add_generation_prompt=True, bos_token=info["bos_token"])
        )
        assert (
            encode(rendered)
            == client.post("/tokenize", json={"messages": messages}).json()["tokens"]
        )


def test_special_tokens_of_a_folder_and_its_named_templates() -> None:
    tokenizer = make_tokenizer()
    tokenizer.use_chat_template("{{ messages }}")
    assert tokenizer.settings()["chat_template"] == "{{ messages }}"
    bare = type(tokenizer)(
        tokenizer.backend,
        chat_template={"tool_use": "T"},
        special_tokens={"bos_token": "<bos>", "unk_token": "<unk>"},
        add_bos=True,
    )
    assert bare.settings() == {
        "bos_token": "<bos>",
        "eos_token": None,
        "pad_token": None,
        "unk_token": "<unk>",
        "add_bos_token": True,
        "chat_template": None,
    }
    assert json.dumps(bare.settings())

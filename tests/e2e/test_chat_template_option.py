"""``chat_template`` in the offline class and in a served process: requests are rendered by the
operator's template.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import PlanRefused
from tests.e2e.served_folder import write_served
from tests.e2e.test_served_model import serving

MINE = "{% for m in messages %}#{{ m.content }}{% endfor %}"
HI = [{"role": "user", "content": "hi"}]


def test_the_offline_class_renders_by_the_operators_template(tmp_path: Path) -> None:
    folder = write_served(tmp_path / "model")
    file = tmp_path / "mine.jinja"
    file.write_text(MINE)
    for template in (file, str(file), MINE):
        with LLM(model=str(folder), weights={"use": "random"}, chat_template=template) as llm:
            answer = llm.chat(HI, SamplingParams(max_tokens=2, ignore_eos=True))[0]
        assert answer.prompt_token_ids == list(b"#hi") and len(answer.token_ids) == 2
    with pytest.raises(
        PlanRefused, match="chat_template: the chat template 'none.jinja' could not be read"
    ):
        LLM(model=str(folder), weights={"use": "random"}, chat_template=tmp_path / "none.jinja")


def test_a_server_renders_by_the_operators_template(tmp_path: Path) -> None:
    folder = write_served(tmp_path / "model")
    (tmp_path / "mine.jinja").write_text(MINE)
    with serving(
        folder, tmp_path / "log", "--chat-template", str(tmp_path / "mine.jinja")
    ) as server:
        assert httpx.post(server.url + "/tokenize", json={"messages": HI}).json()["tokens"] == list(
            b"#hi"
        )
        chat = {"messages": HI, "max_tokens": 2, "return_token_ids": True}
        answer = httpx.post(server.url + "/v1/chat/completions", json=chat, timeout=60).json()
        assert answer["prompt_token_ids"] == list(b"#hi")
        assert str(tmp_path) not in httpx.get(server.url + "/server_info").text

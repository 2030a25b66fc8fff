"""llama-index-llms-openai-like."""

from checks import ANSWER, MODEL, QUESTION, REASONING_URL, URL, run
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

SETTINGS = {
    "model": MODEL,
    "api_key": "none",
    "is_chat_model": True,
    "temperature": 0,
    "max_tokens": 160,
    "max_retries": 0,
}
model = OpenAILike(api_base=URL + "/v1", **SETTINGS)
ASKED = [ChatMessage(role="user", content=QUESTION)]


def chat():
    assert ANSWER in model.chat(ASKED).message.content


def chat_streamed():
    assert ANSWER in "".join(one.delta for one in model.stream_chat(ASKED))


def complete():
    assert ANSWER in model.complete(QUESTION).text


def reasoning():
    extra = {"reasoning_effort": "high"}
    reasoner = OpenAILike(api_base=REASONING_URL + "/v1", additional_kwargs=extra, **SETTINGS)
    blocks = reasoner.chat(ASKED).message.blocks
    assert [one.block_type for one in blocks] == ["thinking", "text"], blocks
    assert blocks[0].content and ANSWER in blocks[1].text, blocks


run(chat, chat_streamed, complete, reasoning)

"""llama-index-llms-openai-like."""

from checks import ANSWER, MODEL, QUESTION, URL, run
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=MODEL,
    api_base=URL + "/v1",
    api_key="none",
    is_chat_model=True,
    temperature=0,
    max_tokens=160,
    max_retries=0,
)
ASKED = [ChatMessage(role="user", content=QUESTION)]


def chat():
    assert ANSWER in model.chat(ASKED).message.content


def chat_streamed():
    assert ANSWER in "".join(one.delta for one in model.stream_chat(ASKED))


def complete():
    assert ANSWER in model.complete(QUESTION).text


run(chat, chat_streamed, complete)

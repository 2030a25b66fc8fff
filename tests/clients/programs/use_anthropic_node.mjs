// @anthropic-ai/sdk for Node.
import Anthropic from "@anthropic-ai/sdk";
import { ANSWER, MESSAGES, MODEL, REASONING_URL, URL, WEATHER, assert, isForecast, run } from "./checks.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const reasoner = client.withOptions({ baseURL: REASONING_URL });
const asked = { model: MODEL, messages: MESSAGES, temperature: 0, max_tokens: 160 };
const tools = [{ name: "weather", description: "Forecast.", input_schema: WEATHER }];
const textOf = (message) => message.content.map((one) => one.text ?? "").join("");

await run({
  async messages() {
    const done = await client.messages.create(asked);
    assert(textOf(done).includes(ANSWER), textOf(done));
  },
  async "messages streamed"() {
    const done = await client.messages.stream(asked).finalMessage();
    assert(textOf(done).includes(ANSWER), textOf(done));
  },
  async "tools streamed"() {
    const stream = client.messages.stream({ ...asked, tools, tool_choice: { type: "any" } });
    const done = await stream.finalMessage();
    isForecast(done.content.find((one) => one.type === "tool_use").input);
  },
  async reasoning() {
    const done = await reasoner.messages
      .stream({ ...asked, thinking: { type: "adaptive" } })
      .finalMessage();
    assert(done.content[0].type === "thinking" && done.content[0].thinking);
    assert(textOf(done).includes(ANSWER), textOf(done));
  },
});

// openai for Node.
import OpenAI from "openai";
import {
  ANSWER,
  MESSAGES,
  MODEL,
  REASONING_URL,
  TOOL,
  URL,
  WEATHER,
  assert,
  isForecast,
  run,
} from "./checks.mjs";

const client = new OpenAI({ baseURL: URL + "/v1", apiKey: "none", maxRetries: 0 });
const reasoner = client.withOptions({ baseURL: REASONING_URL + "/v1" });
const asked = { model: MODEL, messages: MESSAGES, temperature: 0, max_tokens: 160 };

await run({
  async chat() {
    const done = await client.chat.completions.create(asked);
    assert(done.choices[0].message.content.includes(ANSWER));
  },
  async "chat streamed"() {
    let text = "";
    const stream = await client.chat.completions.create({ ...asked, stream: true });
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    assert(text.includes(ANSWER), text);
  },
  async "structured output"() {
    const json_schema = { name: "weather", schema: WEATHER, strict: true };
    const done = await client.chat.completions.create({
      ...asked,
      response_format: { type: "json_schema", json_schema },
    });
    isForecast(JSON.parse(done.choices[0].message.content));
  },
  async "tools streamed"() {
    const runner = client.chat.completions.stream({
      ...asked,
      tools: [TOOL],
      tool_choice: "required",
    });
    const done = await runner.finalChatCompletion();
    isForecast(JSON.parse(done.choices[0].message.tool_calls[0].function.arguments));
  },
  async responses() {
    const done = await client.responses.create({
      model: MODEL,
      input: MESSAGES[0].content,
      temperature: 0,
      max_output_tokens: 160,
    });
    assert(done.output_text.includes(ANSWER), done.output_text);
  },
  async "responses streamed"() {
    const stream = client.responses.stream({
      model: MODEL,
      input: MESSAGES[0].content,
      temperature: 0,
      max_output_tokens: 160,
    });
    const done = await stream.finalResponse();
    assert(done.output_text.includes(ANSWER), done.output_text);
  },
  async reasoning() {
    const done = await reasoner.chat.completions.create({ ...asked, reasoning_effort: "high" });
    const message = done.choices[0].message;
    assert(message.reasoning_content && message.content.includes(ANSWER), JSON.stringify(message));
  },
  async "reasoning of responses"() {
    const done = await reasoner.responses.create({
      model: MODEL,
      input: MESSAGES[0].content,
      temperature: 0,
      max_output_tokens: 160,
      reasoning: { effort: "high" },
    });
    assert(done.output[0].type === "reasoning" && done.output[0].content[0].text);
    assert(done.output_text.includes(ANSWER), done.output_text);
  },
});

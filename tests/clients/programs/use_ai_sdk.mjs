// ai with @ai-sdk/openai-compatible.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";
import { ANSWER, MESSAGES, MODEL, REASONING_URL, URL, WEATHER, assert, isForecast, run } from "./checks.mjs";

const providerOf = (url) =>
  createOpenAICompatible({
    name: "glowplug",
    baseURL: url + "/v1",
    apiKey: "none",
    includeUsage: true,
  });
const asked = {
  model: providerOf(URL)(MODEL),
  prompt: MESSAGES[0].content,
  temperature: 0,
  maxOutputTokens: 160,
  maxRetries: 0,
};
const tools = { weather: tool({ description: "Forecast.", inputSchema: jsonSchema(WEATHER) }) };

await run({
  async generateText() {
    const done = await generateText(asked);
    assert(done.text.includes(ANSWER), done.text);
  },
  async streamText() {
    let text = "";
    const result = streamText(asked);
    for await (const part of result.textStream) text += part;
    assert(text.includes(ANSWER), text);
    assert((await result.usage).outputTokens > 0);
  },
  async tools() {
    const done = await generateText({ ...asked, tools, toolChoice: "required" });
    isForecast(done.toolCalls[0].input);
  },
  async "tools streamed"() {
    const result = streamText({ ...asked, tools, toolChoice: "required" });
    isForecast((await result.toolCalls)[0].input);
  },
  async reasoning() {
    const result = streamText({
      ...asked,
      model: providerOf(REASONING_URL)(MODEL),
      providerOptions: { glowplug: { reasoningEffort: "high" } },
    });
    const text = await result.text;
    assert((await result.reasoningText) && text.includes(ANSWER), text);
  },
});

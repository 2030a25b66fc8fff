// The chat view: a conversation with the served model, streamed.

import { ApiError, events, getJson, store, stored } from "./api.js";
import { $, el, number, seconds, setText } from "./dom.js";
import { Markdown } from "./markdown.js";

const SETTINGS = "glowplug.settings";
const FIELDS = ["temperature", "top-p", "max-tokens", "thinking", "system", "model"];
const DRAW_MILLISECONDS = 60; // least time between two updates of a growing answer
const NEAR_END = 80; // pixels from the end within which the view follows an answer

const ENDS = {
  length: "cut off at the limit of tokens",
  abort: "aborted by the server",
  timeout: "out of time",
  stopped: "stopped",
};

/** Return the body of the request for an answer. */
export function requestBody(messages, settings) {
  const body = { messages: [], stream: true, stream_options: { include_usage: true } };
  if (settings.model) body.model = settings.model;
  if (settings.system) body.messages.push({ role: "system", content: settings.system });
  body.messages.push(...messages.map(({ role, content }) => ({ role, content })));
  const numbers = { temperature: "temperature", "top-p": "top_p", "max-tokens": "max_tokens" };
  for (const [name, field] of Object.entries(numbers)) {
    if (settings[name]) body[field] = Number(settings[name]);
  }
  if (settings.thinking) body.chat_template_kwargs = { thinking: settings.thinking === "on" };
  return body;
}

/** One answer on the page. */
class Answer {
  constructor(name) {
    this.reasoning = "";
    this.content = "";
    this.started = performance.now();
    this.first = null;
    this.thought = el("div", { class: "thought" });
    this.summary = el("summary", {}, "Thinking …");
    this.fold = el("details", { class: "reasoning", hidden: true }, this.summary, this.thought);
    this.body = el("div", { class: "text" });
    this.note = el("span", {}, "waiting for the first token");
    this.copy = el("button", { type: "button", class: "quiet" }, "Copy");
    this.copy.addEventListener("click", () => navigator.clipboard?.writeText(this.content));
    this.foot = el("footer", { class: "muted" }, this.note);
    this.element = el("article", { class: "message assistant" },
      el("h3", {}, name), this.fold, this.body, this.foot);
    this.markdown = new Markdown(this.body);
    this.drawn = 0;
    this.timer = 0;
  }

  add(delta) {
    if (this.first === null) this.first = performance.now();
    this.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    this.content += delta.content ?? "";
    if (!this.timer) {
      const wait = Math.max(0, DRAW_MILLISECONDS - (performance.now() - this.drawn));
      this.timer = setTimeout(() => this.draw(), wait);
    }
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.drawn = performance.now();
    if (this.reasoning) {
      this.fold.hidden = false;
      setText(this.thought, this.reasoning);
      if (this.content) setText(this.summary, "Reasoning");
    }
    this.markdown.set(this.content);
    setText(this.note, this.first === null ? "waiting for the first token" : "answering");
    this.onDraw?.();
  }

  end(reason, usage) {
    this.draw();
    if (this.reasoning) setText(this.summary, "Reasoning");
    const parts = ENDS[reason] ? [ENDS[reason]] : [];
    if (usage) {
      const took = (performance.now() - (this.first ?? this.started)) / 1000;
      parts.push(`${number(usage.completion_tokens)} tokens`);
      if (usage.completion_tokens > 1 && took > 0) {
        parts.push(`${number((usage.completion_tokens - 1) / took)} tokens/s`);
      }
    }
    if (this.first !== null) parts.push(`first after ${seconds((this.first - this.started) / 1000)}`);
    setText(this.note, parts.join(" · "));
    if (this.content && navigator.clipboard) this.foot.append(this.copy);
  }

  fail(text, retry) {
    this.draw();
    const button = el("button", { type: "button", class: "quiet" }, "Try again");
    button.addEventListener("click", retry);
    this.foot.replaceChildren(el("span", { class: "error", role: "alert" }, text), button);
  }
}

export class ChatView {
  /** onKey: called when the server wants a key. */
  constructor(onKey) {
    this.onKey = onKey;
    this.messages = []; // {role, content, reasoning}
    this.running = null; // AbortController of the answer that is being streamed
    this.ready = false;
    this.restore();
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    $("view-chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("clear").addEventListener("click", () => this.clear());
    $("save").addEventListener("click", () => this.save());
    for (const name of FIELDS) $(name).addEventListener("change", () => this.keep());
  }

  /** Read the served models, and whether the chat template has a switch for thinking. */
  async load() {
    const [models, info] = await Promise.all([getJson("v1/models"), getJson("model_info")]);
    const names = models.data.map((one) => one.id);
    const held = $("model").value || this.wantedModel;
    $("model").replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    if (names.includes(held)) $("model").value = held;
    $("model-label").hidden = names.length < 2;
    $("thinking-label").hidden = !info.thinking_switch;
    this.chats = info.has_chat_template;
    this.setReady(this.ready, this.why);
  }

  restore() {
    try {
      const held = JSON.parse(stored(SETTINGS) || "{}");
      for (const name of FIELDS) if (held[name]) $(name).value = held[name];
      this.wantedModel = held.model;
    } catch {
      store(SETTINGS, null);
    }
  }

  settings() {
    const found = Object.fromEntries(FIELDS.map((name) => [name, $(name).value.trim()]));
    if ($("thinking-label").hidden) found.thinking = "";
    if ($("model-label").hidden) found.model = "";
    return found;
  }

  keep() {
    store(SETTINGS, JSON.stringify(this.settings()));
  }

  /** Allow or forbid sending. why: the reason that is shown while it is forbidden. */
  setReady(ready, why) {
    this.ready = ready;
    this.why = why;
    const missing = this.chats === false ? "This model has no chat template, so it cannot chat." : "";
    $("send").disabled = !ready || Boolean(missing);
    setText($("chat-note"), missing || (ready ? "" : why || ""));
  }

  async send() {
    const text = $("message").value.trim();
    if (!text || this.running || $("send").disabled) return;
    const invalid = FIELDS.map((name) => $(name)).find((field) => !field.checkValidity());
    if (invalid) {
      $("settings").open = true;
      invalid.reportValidity();
      return;
    }
    $("message").value = "";
    this.messages.push({ role: "user", content: text });
    this.append(el("article", { class: "message user" }, el("h3", {}, "You"),
      el("div", { class: "text plain" }, text)));
    await this.answer();
  }

  append(element) {
    $("empty").hidden = true;
    $("log").append(element);
    $("log").scrollTop = $("log").scrollHeight;
  }

  async answer() {
    const settings = this.settings();
    const answer = new Answer(settings.model || $("model").value || "Model");
    const log = $("log");
    answer.onDraw = () => {
      if (log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END + this.grown(answer)) {
        log.scrollTop = log.scrollHeight;
      }
    };
    this.append(answer.element);
    const control = new AbortController();
    this.busy(control);
    let reason = null;
    let usage = null;
    try {
      const body = requestBody(this.messages, settings);
      for await (const event of events("v1/chat/completions", body, control.signal)) {
        const choice = event.choices?.[0];
        if (choice?.delta) answer.add(choice.delta);
        reason = choice?.finish_reason ?? reason;
        usage = event.usage ?? usage;
      }
    } catch (error) {
      if (!control.signal.aborted) {
        this.failed(answer, error);
        return;
      }
      reason = "stopped";
    } finally {
      this.busy(null);
    }
    answer.end(reason, usage);
    this.messages.push({
      role: "assistant", content: answer.content, reasoning: answer.reasoning,
    });
  }

  /** Return the pixels by which an answer has grown since the last call. */
  grown(answer) {
    const height = answer.element.offsetHeight;
    const more = height - (answer.height ?? height);
    answer.height = height;
    return more;
  }

  failed(answer, error) {
    if (error instanceof ApiError && error.status === 401) this.onKey(error.message);
    answer.fail(`${error.message}`, () => {
      if (this.running) return;
      answer.element.remove();
      this.answer();
    });
  }

  busy(control) {
    const focused = [$("send"), $("stop")].includes(document.activeElement);
    this.running = control;
    $("send").hidden = control !== null;
    $("stop").hidden = control === null;
    $("log").setAttribute("aria-busy", String(control !== null));
    if (focused) (control !== null ? $("stop") : $("message")).focus();
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    $("log").replaceChildren($("empty"));
    $("empty").hidden = false;
    $("message").focus();
  }

  save() {
    const { system } = this.settings();
    const first = system ? [{ role: "system", content: system }] : [];
    const text = JSON.stringify({ messages: [...first, ...this.messages] }, null, 2);
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    el("a", { href: url, download: "conversation.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }
}

// The page: views, the state of the server, the API key.

import { ApiError, apiKey, getJson, useKey } from "./api.js";
import { ChatView } from "./chat.js";
import { $, setText } from "./dom.js";
import { StatusView } from "./status.js";

const POLL = { status: 1000, chat: 3000 }; // milliseconds between two samples, by view
const RETRY = 2000; // milliseconds until the next try when the server does not answer

const MESSAGES = {
  starting: "The model is loading.",
  draining: "The server is shutting down. Running answers may still finish; new ones are refused.",
  silent: "The engine does not answer. It may be busy with a long step or stuck.",
  dead: "The engine has stopped, and the server is about to end.",
  unreachable: "The server does not answer. This page tries again until it does.",
  locked: "This server needs an API key.",
};

class Page {
  constructor() {
    this.status = new StatusView();
    this.chat = new ChatView((message) => this.askKey(message));
    this.shown = "";
    this.loaded = ""; // the start of the server whose details are shown
    this.timer = 0;
    this.polling = false;
    addEventListener("hashchange", () => this.route());
    document.addEventListener("visibilitychange", () => this.again(0));
    $("skip").addEventListener("click", (event) => {
      event.preventDefault();
      $("main").focus();
    });
    $("key-button").addEventListener("click", () => this.askKey(""));
    $("key-close").addEventListener("click", () => $("key-dialog").close());
    $("key-forget").addEventListener("click", () => this.setKey(""));
    $("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.setKey($("key").value.trim());
    });
  }

  async start() {
    this.route();
    try {
      this.needsKey = (await getJson("page/settings.json")).key_required;
    } catch {
      this.needsKey = false; // the polls show that the server does not answer
    }
    $("key-button").hidden = !this.needsKey;
    if (this.needsKey && !apiKey()) this.lock("");
    else this.poll();
  }

  // ---- views --------------------------------------------------------------------------------------

  route() {
    const view = location.hash === "#chat" ? "chat" : "status";
    for (const name of ["status", "chat"]) {
      $(`view-${name}`).hidden = name !== view;
      if (name === view) $(`to-${name}`).setAttribute("aria-current", "page");
      else $(`to-${name}`).removeAttribute("aria-current");
    }
    document.title = `${view === "chat" ? "Chat" : "Status"} – glowplug`;
    if (this.shown && view === "chat") $("message").focus();
    this.shown = view;
    this.again(0);
  }

  // ---- state --------------------------------------------------------------------------------------

  again(milliseconds) {
    clearTimeout(this.timer);
    if (!this.polling && this.needsKey !== undefined) {
      this.timer = setTimeout(() => this.poll(), milliseconds);
    }
  }

  async poll() {
    if (this.polling || document.hidden || (this.needsKey && !apiKey())) return;
    this.polling = true;
    let wait = POLL[this.shown];
    const key = apiKey();
    try {
      const sample = await getJson("status");
      if (key === apiKey()) await this.take(sample);
    } catch (error) {
      // a key that was changed meanwhile is not refused by this answer
      if (key === apiKey()) this.lost(error);
      wait = key === apiKey() ? RETRY : 0;
    } finally {
      this.polling = false;
    }
    this.again(wait);
  }

  async take(sample) {
    const known = `${sample.started} ${sample.fingerprint} ${sample.status === "starting"}`;
    const progress = Object.values(sample.progress);
    const detail = sample.status === "starting" && progress.length ? ` (${progress[0]})` : "";
    if (known !== this.loaded) {
      await Promise.all([this.status.load(), this.chat.load()]);
      this.loaded = known;
    }
    this.show(sample.status, (MESSAGES[sample.status] ?? "") + detail);
    setText($("model-name"), sample.model);
    this.status.show(sample);
  }

  lost(error) {
    if (error instanceof ApiError && error.status === 401) {
      this.needsKey = true;
      $("key-button").hidden = false;
      useKey("");
      this.lock(error.message);
      return;
    }
    this.status.gap();
    const reached = error instanceof ApiError && error.status > 0;
    this.show("unreachable", reached ? `The server answered: ${error.message}` : MESSAGES.unreachable);
    if (!(error instanceof ApiError)) throw error;
  }

  show(state, message) {
    $("state").dataset.state = state;
    setText($("state"), state);
    setText($("banner"), message);
    this.chat.setReady(state === "ready" || state === "silent", message);
  }

  // ---- key ----------------------------------------------------------------------------------------

  lock(message) {
    this.show("locked", MESSAGES.locked);
    this.askKey(message);
  }

  askKey(message) {
    setText($("key-error"), message);
    $("key").value = "";
    $("key-forget").hidden = !apiKey();
    if (!$("key-dialog").open) $("key-dialog").showModal();
    $("key").focus();
  }

  setKey(key) {
    useKey(key);
    this.loaded = "";
    $("key").value = "";
    $("key-dialog").close();
    if (key) this.poll();
    else this.show("locked", MESSAGES.locked);
  }
}

new Page().start();

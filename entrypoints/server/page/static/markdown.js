// A small part of Markdown as elements: paragraphs, headings, lists, code, bold and italic text.
// Links and images stay text. Everything is set as text, so no markup of a model takes effect.

import { el } from "./dom.js";

const INLINE = /(`+)([^`\n]+?)\1(?!`)|\*\*([^*\n]+?)\*\*|\*([^*\s][^*\n]*?)\*/g;

/** Return the blocks of a text: [kind, source of the block]. A block that grows stays the last. */
export function blocks(text) {
  const found = [];
  let lines = [];
  let fence = null;
  const end = () => {
    if (lines.length) found.push([fence === null ? "text" : "code", lines.join("\n")]);
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = /^\s{0,3}(```+|~~~+)/.exec(line);
    if (fence === null && mark) {
      end();
      fence = mark[1];
    } else if (fence !== null && mark && mark[1].startsWith(fence) && line.trim() === mark[1]) {
      found.push(["code", lines.join("\n")]);
      lines = [];
      fence = null;
    } else if (fence === null && line.trim() === "") {
      end();
    } else {
      lines.push(line);
    }
  }
  end();
  return found;
}

function inline(parent, text) {
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(at, match.index));
    const [whole, , code, strong, soft] = match;
    if (code !== undefined) parent.append(el("code", {}, code));
    else if (strong !== undefined) parent.append(el("strong", {}, strong));
    else parent.append(el("em", {}, soft));
    at = match.index + whole.length;
  }
  parent.append(text.slice(at));
  return parent;
}

function rendered(kind, source) {
  if (kind === "code") {
    return el("pre", { tabindex: "0" }, el("code", {}, source));
  }
  const lines = source.split("\n");
  const heading = /^(#{1,6})\s+(.*)$/.exec(lines[0]);
  if (heading && lines.length === 1) return inline(el("p", { class: "heading" }), heading[2]);
  for (const [item, list] of [[/^\s*[-*+]\s+/, "ul"], [/^\s*\d+[.)]\s+/, "ol"]]) {
    if (lines.every((line) => item.test(line))) {
      const start = list === "ol" ? parseInt(lines[0], 10) : null;
      return el(list, { start: start > 1 ? start : null },
        ...lines.map((line) => inline(el("li"), line.replace(item, ""))));
    }
  }
  return inline(el("p"), source);
}

/** Show a text that grows: only blocks whose source changed are made anew. */
export class Markdown {
  constructor(parent) {
    this.parent = parent;
    this.shown = [];
  }

  set(text) {
    const wanted = blocks(text);
    wanted.forEach(([kind, source], at) => {
      const held = this.shown[at];
      if (held && held.kind === kind && held.source === source) return;
      const element = rendered(kind, source);
      if (held) held.element.replaceWith(element);
      else this.parent.append(element);
      this.shown[at] = { kind, source, element };
    });
    for (const extra of this.shown.splice(wanted.length)) extra.element.remove();
  }
}

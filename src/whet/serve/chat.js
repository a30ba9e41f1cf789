// A conversation with one model. Text of the model is shown as text and never as markup.
"use strict";
const by = (id) => document.getElementById(id);
const conversation = by("conversation");
let messages = [];
let running = null;

const show = (role, text, kind) => {
  const box = document.createElement("article");
  const name = document.createElement("h3");
  const body = document.createElement("p");
  box.className = `message ${kind || role}`;
  name.textContent = role;
  body.textContent = text;
  box.append(name, body);
  conversation.append(box);
  box.scrollIntoView({ block: "end" });
  return body;
};

const reason = async (response) => {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`;
  }
};

const events = async function* (response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    pending += value;
    const parts = pending.split("\n\n");
    pending = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
};

const answer = async () => {
  const system = by("system").value.trim();
  const model = by("model").value;
  const body = show(model, "");
  let text = "";
  running = new AbortController();
  by("send").textContent = "Stop";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      signal: running.signal,
      body: JSON.stringify({
        model,
        messages: system ? [{ role: "system", content: system }, ...messages] : messages,
        temperature: Number(by("temperature").value),
        max_tokens: Number(by("limit").value),
        stream: true,
      }),
    });
    if (!response.ok) throw new Error(await reason(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        text += choice.delta.content || "";
        body.textContent = text;
        if (choice.finish_reason === "length") body.textContent = `${text} …`;
      }
      body.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message, "failed");
  } finally {
    running = null;
    by("send").textContent = "Send";
    if (text.trim()) messages.push({ role: "assistant", content: text });
    else messages.pop();
  }
};

by("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const text = by("text").value;
  if (!text.trim()) return;
  by("text").value = "";
  messages.push({ role: "user", content: text });
  show("user", text);
  answer();
});
by("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    by("form").requestSubmit();
  }
});
by("reset").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  conversation.replaceChildren();
});
fetch("/v1/models")
  .then((response) => response.json())
  .then(({ data }) => {
    for (const { id } of data) by("model").add(new Option(id, id));
    by("title").textContent = data.length === 1 ? data[0].id : "Chat";
  });

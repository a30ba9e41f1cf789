// Requests to the server. A change carries a header that only this page can know.

let session = null;

export const openSession = () => (session = getJson("/api/session"));

const address = (path, parameters) => {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters ?? {})) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") query.append(name, each);
    }
  }
  return query.size ? `${path}?${query}` : path;
};

async function read(response) {
  const answer = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(answer.error?.message ?? answer.error ?? `the server answered ${response.status}`);
  return answer;
}

const GONE = "whet dash does not answer: it has ended, or the connection is lost";

export async function getJson(path, parameters, signal) {
  let response;
  try {
    response = await fetch(address(path, parameters), { signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(GONE);
  }
  return read(response);
}

export async function postJson(path, body, signal) {
  const response = await post(path, body, signal);
  return read(response);
}

export async function post(path, body, signal) {
  const headers = { "content-type": "application/json", "x-whet-csrf": (await session).csrf };
  try {
    return await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(GONE);
  }
}

// Server-sent events: handlers by the name of the event; `again` after a lost connection. Returns a function that ends it.
export function listen(parameters, handlers) {
  const indicator = document.querySelector("#live");
  const source = new EventSource(address("/api/live", parameters));
  let opened = 0;
  source.onopen = () => {
    indicator.className = "live on";
    indicator.textContent = "live";
    opened += 1;
    if (opened > 1) handlers.again?.();
  };
  source.onerror = () => {
    indicator.className = "live off";
    indicator.textContent = "not connected";
  };
  for (const [name, handle] of Object.entries(handlers)) {
    if (name !== "again") source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  }
  return () => {
    source.close();
    indicator.className = "live";
    indicator.textContent = "";
  };
}

export function say(text, kind = "bad") {
  const box = document.createElement("p");
  box.className = `message ${kind}`;
  box.textContent = text;
  const close = document.createElement("button");
  close.type = "button";
  close.textContent = "✕";
  close.setAttribute("aria-label", "Close this message");
  close.addEventListener("click", () => box.remove());
  box.append(close);
  document.querySelector("#messages").append(box);
  if (kind !== "bad") setTimeout(() => box.remove(), 8000);
}

// The objects of a stream with one a line, as they come.
export async function* postLines(path, body, signal) {
  const response = await post(path, body, signal);
  if (!response.ok) await read(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) yield JSON.parse(line);
  }
}

// Requests with the key, and the event feed, which reconnects.

const KEY = "memsaver-key";
const RETRY_MS = 2000;

export class Refused extends Error {}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

function headers() {
  // fetch sends one byte per character of a header; a key is sent as UTF-8.
  const bytes = new TextEncoder().encode(key.get());
  return bytes.length ? { Authorization: `Bearer ${String.fromCharCode(...bytes)}` } : {};
}

/** Call one of the paths; returns the answer, or throws its message. */
export async function call(method, path, body) {
  const answer = await fetch(path, {
    method,
    headers: { "Content-Type": "application/json", ...headers() },
    body: body && JSON.stringify(body),
  });
  if (answer.status === 401) throw new Refused("the key is wrong");
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.message ?? `${path}: ${answer.status}`);
  return content;
}

/**
 * Follow the feed for as long as the page lives. EventSource cannot send a key, so this reads the stream itself.
 *
 * `on` has a function for each event, `connected(bool, why)`, and `refused()`; the next attempt waits for the promise
 * that `refused` returns.
 */
export async function follow(path, on) {
  for (;;) {
    try {
      const answer = await fetch(path, { headers: headers(), cache: "no-store" });
      if (answer.status === 401) {
        await on.refused();
        continue;
      }
      if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
      on.connected(true);
      await read(answer.body, on);
      on.connected(false, "the server has ended the connection");
    } catch (error) {
      on.connected(false, error instanceof TypeError ? "no answer from the server" : error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

async function read(body, on) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (pending + value).split("\n\n");
    pending = parts.pop();
    for (const part of parts) {
      const [first, second] = part.split("\n");
      on[first.slice("event: ".length)]?.(JSON.parse(second.slice("data: ".length)));
    }
  }
}

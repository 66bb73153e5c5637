// A streamed request: sends a body and passes on the chunks of its answer with their arrival times.

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Call `onChunk(chunk, ms)` for every chunk, `ms` after the request was sent; returns when the stream ends. Throws
// Refused for an error of the server, before or in the stream, and fetch's error if cancelled or unreachable.
export async function ask(path, body, key, signal, onChunk) {
  const started = performance.now();
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let done = false;
  try {
    for (;;) {
      const piece = await reader.read();
      const now = performance.now() - started;
      if (piece.done) break;
      const lines = (rest + decoder.decode(piece.value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") {
          done = true;
          continue;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Refused(chunk.error.message, 500);
        onChunk(chunk, now);
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
  if (!done) throw new Refused("the stream ended before the answer was complete.", 500);
}

// The error in a response that is not a stream.
export async function refusal(response) {
  let message = `the server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // the body is not JSON, so only the status is known
  }
  return new Refused(message, response.status);
}

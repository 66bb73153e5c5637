// A streamed request: sends a body and gives its chunks with the times at which they came.

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Call `heard(chunk, ms)` for every chunk; ms count from the request. Ends when the stream does; raises Refused for an
// error of the server, wherever it comes, and what fetch raises where the request is cancelled or nobody answers.
export async function ask(path, body, key, signal, heard) {
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
        heard(chunk, now);
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
  if (!done) throw new Refused("the answer ended before its end.", 500);
}

// What an answer that is no stream says of a mistake.
export async function refusal(response) {
  let message = `the server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // it is no JSON: its status is all there is
  }
  return new Refused(message, response.status);
}

// Requests to the server that served the page. All addresses are relative to it.

const token = new URLSearchParams(location.search).get("token");
const headers: Record<string, string> = token ? { Authorization: `Bearer ${token}` } : {};

/** For what cannot send a header: players and event streams. */
export function withToken(address: string): string {
  return token ? `${address}${address.includes("?") ? "&" : "?"}token=${encodeURIComponent(token)}` : address;
}

/** Nobody answers, or only a proxy whose server is away: it may be there again soon. */
export class Unreachable extends Error {}

const AWAY = [502, 503, 504];

/** FastAPI's two forms of an error, in words. */
function inWords(text: string, status: number): string {
  try {
    const { detail } = JSON.parse(text) as { detail?: unknown };
    if (typeof detail === "string") return detail;
    if (Array.isArray(detail)) {
      const lines = detail as { loc?: (string | number)[]; msg?: string }[];
      return lines.map(({ loc, msg }) => `${(loc ?? []).slice(1).join(" ")}: ${msg ?? "is not valid"}`).join("; ");
    }
  } catch {
    // not JSON: a proxy's page
  }
  return `The server answered with status ${status}.`;
}

async function send(method: string, address: string, body?: unknown): Promise<unknown> {
  const json: Record<string, string> = body === undefined ? {} : { "Content-Type": "application/json" };
  let response: Response;
  let text: string;
  try {
    response = await fetch(address, { method, headers: { ...headers, ...json }, body: JSON.stringify(body) });
    text = await response.text();
  } catch {
    throw new Unreachable("The server cannot be reached.");
  }
  if (AWAY.includes(response.status)) throw new Unreachable(inWords(text, response.status));
  if (!response.ok) throw new Error(inWords(text, response.status));
  return text ? JSON.parse(text) : null;
}

export const get = (address: string) => send("GET", address);
export const post = (address: string, body: unknown) => send("POST", address, body);
export const remove = (address: string) => send("DELETE", address);

/** Sends a file; `onShare` hears which share of it (0 to 1) has been sent. */
export function upload(address: string, file: File, onShare: (share: number) => void, signal: AbortSignal): Promise<unknown> {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest(); // fetch does not tell how far an upload is
    request.open("POST", address);
    for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => onShare(event.loaded / event.total);
    request.onerror = () => reject(new Error("The upload broke off."));
    request.onabort = () => reject(new Error("The upload was stopped."));
    request.onload = () => {
      if (request.status < 300) resolve(JSON.parse(request.responseText));
      else reject(new Error(inWords(request.responseText, request.status)));
    };
    signal.addEventListener("abort", () => request.abort());
    const form = new FormData();
    form.append("file", file);
    request.send(form);
  });
}

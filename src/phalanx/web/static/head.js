// Requests to the head. Its cookie goes along by itself; a change also repeats the session's CSRF value.
const csrf = document.querySelector('meta[name="csrf"]')?.getAttribute("content") ?? "";
export const actions = new Set((document.body.dataset.actions ?? "").split(" "));

/**
 * The reply of a route as an object. `body` is sent as JSON, `text` as it is. Throws an Error with the head's own words.
 * @param {string} path
 * @param {{method?: string, body?: unknown, text?: string}} [options]
 * @returns {Promise<any>}
 */
export async function ask(path, { method = "GET", body, text } = {}) {
  const headers = method === "GET" ? {} : { "X-Phalanx-Csrf": csrf };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (text !== undefined) headers["Content-Type"] = "text/plain";
  let reply;
  try {
    reply = await fetch(path, { method, headers, body: body === undefined ? text : JSON.stringify(body) });
  } catch {
    throw new Error("The head does not answer. Check the connection, then try again.");
  }
  if (reply.status === 401) location.reload(); // the session has ended: the sign-in page leads back here
  const found = reply.status === 204 ? null : await reply.json().catch(() => null);
  if (!reply.ok) {
    const { message = `The head answered ${reply.status}.`, hint = "" } = found?.error ?? {};
    throw new Error(hint ? `${message} (${hint})` : message);
  }
  return found;
}

/** The address of a page or route, each segment quoted. */
export const path = (...segments) => "/" + segments.map(encodeURIComponent).join("/");

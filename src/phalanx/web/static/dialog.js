// Asks before a change: a dialog of the browser, which keeps the keyboard inside and closes by Escape.

const WHY = { label: "Reason (others read it in the history)", maxLength: 500, name: "why" };

/**
 * What was typed ("" if nothing was asked for), or null if the reader does not want the change.
 * `input`: properties of a field that asks for a number or word, and its `label`; `asksWhy` asks for a reason.
 * @typedef {{label: string, name?: string, type?: string, maxLength?: number, min?: number, max?: number, step?: number, value?: unknown, required?: boolean}} Field
 * @typedef {{title: string, text: string, button: string, asksWhy?: boolean, input?: Field, danger?: boolean}} Question
 * @param {Question} question
 * @returns {Promise<string | null>}
 */
export function confirmed({ title, text, button, asksWhy = false, input = asksWhy ? WHY : null, danger = false }) {
  const dialog = document.createElement("dialog");
  const form = document.createElement("form");
  form.method = "dialog";
  const head = document.createElement("strong");
  head.textContent = `${title}?`;
  const body = document.createElement("span");
  body.textContent = text;
  form.append(head, body);
  const typed = document.createElement("input");
  if (input) {
    const { label: words, ...properties } = input;
    const label = document.createElement("label");
    label.textContent = words;
    Object.assign(typed, properties);
    label.append(typed);
    form.append(label);
  }
  const [no, yes] = [document.createElement("button"), document.createElement("button")];
  no.type = "button";
  no.textContent = "Back";
  no.addEventListener("click", () => dialog.close(""));
  yes.type = "submit";
  yes.value = "yes";
  yes.className = danger ? "danger" : "primary";
  yes.textContent = button;
  const buttons = document.createElement("div");
  buttons.className = "buttons";
  buttons.append(no, yes);
  form.append(buttons);
  dialog.append(form);
  dialog.setAttribute("aria-label", title);
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes" ? typed.value.trim() : null);
    });
    dialog.showModal();
    (input ? typed : no).focus();
  });
}

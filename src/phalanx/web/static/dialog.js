// Asks before a change: a dialog of the browser, which keeps the keyboard inside and closes by Escape.

/** The reason that was given ("" if none was asked for), or null if the reader does not want the change. */
export function confirmed({ title, text, button, asksWhy = false, danger = false }) {
  const dialog = document.createElement("dialog");
  const form = document.createElement("form");
  form.method = "dialog";
  const head = document.createElement("strong");
  head.textContent = `${title}?`;
  const body = document.createElement("span");
  body.textContent = text;
  form.append(head, body);
  const reason = document.createElement("input");
  if (asksWhy) {
    const label = document.createElement("label");
    label.textContent = "Reason (others read it in the history)";
    reason.maxLength = 500;
    reason.name = "why";
    label.append(reason);
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
      resolve(dialog.returnValue === "yes" ? reason.value.trim() : null);
    });
    dialog.showModal();
    (asksWhy ? reason : no).focus();
  });
}

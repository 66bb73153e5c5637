// A conversation: its messages, which the next request sends and the page lists.
// The latest answer is shown in the lanes, with its colours; it appears in the list when the next message is sent.

export class Conversation {
  constructor(list) {
    this.list = list;
    this.clear();
  }

  clear() {
    this.messages = [];
    this.list.replaceChildren();
  }

  // Show the latest answer in the list, since the lanes will show the next one.
  unfold() {
    this.list.querySelector(".latest")?.classList.remove("latest");
  }

  // Add the user's message.
  ask(content) {
    this.add("user", content);
  }

  // Add the model's answer.
  answer(content) {
    this.add("assistant", content).classList.add("latest");
  }

  // Remove the user's last message, which got no answer.
  retract() {
    this.messages.pop();
    this.list.lastChild.remove();
    if (this.list.lastChild) this.show(this.list.lastChild);
  }

  add(role, content) {
    this.messages.push({ role, content });
    const item = Object.assign(document.createElement("li"), { className: `turn ${role}` });
    item.append(Object.assign(document.createElement("span"), { className: "hint", textContent: role === "user" ? "You" : "Model" }), content);
    this.list.append(item);
    this.show(item);
    return item;
  }

  show(item) {
    this.list.scrollTop = item.offsetTop;
  }
}

// Runs before the first paint, so that a chosen theme never flashes. No choice: the system's.
(() => {
  const order = ["auto", "light", "dark"];
  const read = () => {
    try {
      const kept = localStorage.getItem("theme");
      return order.includes(kept) ? kept : "auto";
    } catch {
      return "auto"; // storage is switched off
    }
  };
  const apply = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };
  apply(read());
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    if (!button) return;
    const say = (theme) => {
      button.innerHTML = "";
      button.append("Theme: ", Object.assign(document.createElement("b"), { textContent: theme }));
    };
    button.hidden = false;
    say(read());
    button.addEventListener("click", () => {
      const next = order[(order.indexOf(read()) + 1) % order.length];
      try {
        localStorage.setItem("theme", next);
      } catch {
        // it lasts for this page then
      }
      apply(next);
      say(next);
    });
  });
})();

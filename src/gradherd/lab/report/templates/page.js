"use strict";
// Charts are drawn, and switched by the style sheet. This turns the theme, and keeps what was chosen
// when the page is loaded again.
(() => {
  const root = document.documentElement, system = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = document.getElementById("theme");
  const inputs = [...document.querySelectorAll(".controls input")];
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const named = () => { theme.textContent = isDark() ? "light theme" : "dark theme"; };

  function save() {
    const chosen = Object.fromEntries(inputs.map((one) => [one.id, one.checked]));
    const all = JSON.stringify({ chosen, theme: root.dataset.theme });
    try { sessionStorage.setItem(location.pathname, all); } catch { /* forbidden: until reload */ }
  }

  try {
    const kept = JSON.parse(sessionStorage.getItem(location.pathname) ?? "{}");
    for (const one of inputs) one.checked = kept.chosen?.[one.id] ?? one.checked;
    if (kept.theme) root.dataset.theme = kept.theme;
  } catch { /* damaged or forbidden: as if nothing had been chosen */ }
  inputs.forEach((one) => one.addEventListener("change", save));
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    named();
    save();
  });
  system.addEventListener("change", named);
  named();
  root.dataset.ready = "true"; // Shows what needs a script.
})();

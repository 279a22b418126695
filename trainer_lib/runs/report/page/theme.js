// Light and dark.

const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const themeWord = () => (isDark() ? "Light" : "Dark");

function switchTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  document.getElementById("theme").textContent = themeWord();
  try { localStorage.setItem("theme", document.documentElement.dataset.theme); } catch (error) { /* a file may have no storage */ }
}

const themeButton = () => make("button", { id: "theme", type: "button", onclick: switchTheme }, themeWord());

try {
  const kept = localStorage.getItem("theme");
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
} catch (error) { /* the same */ }

// The theme: light, dark, or the system's.

const NAMES = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" };
const NEXT = { auto: "light", light: "dark", dark: "auto" };

export function setUpTheme(button) {
  const apply = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = NAMES[theme];
    localStorage.setItem("kvweave-theme", theme);
  };
  const stored = localStorage.getItem("kvweave-theme");
  let now = stored in NEXT ? stored : "auto";
  apply(now);
  button.addEventListener("click", () => apply((now = NEXT[now])));
}

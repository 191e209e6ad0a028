// Applied before the page is drawn, so that it does not flash: the theme that was chosen on this machine.
"use strict";

const THEMES = ["system", "light", "dark"];

function chosenTheme() {
  const found = localStorage.getItem("fedet-theme");
  return THEMES.includes(found) ? found : "system";
}

function applyTheme() {
  const theme = chosenTheme();
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

applyTheme();

document.addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("theme");
  const label = () => { button.textContent = `Theme: ${chosenTheme()}`; };
  button.hidden = false;
  label();
  button.addEventListener("click", () => {
    localStorage.setItem("fedet-theme", THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length]);
    applyTheme();
    label();
    document.dispatchEvent(new Event("fedet-theme"));
  });
});

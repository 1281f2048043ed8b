// Names that Furo leaves out for screen readers: the two side columns and the level of captions.
addEventListener("DOMContentLoaded", () => {
  const names = [
    ["p.caption[role=heading]", "aria-level", "2"],
    ["aside.sidebar-drawer", "aria-label", "All pages"],
    ["aside.toc-drawer", "aria-label", "On this page"],
    ["pre", "tabindex", "0"],
  ];
  for (const [selector, name, value] of names) {
    document.querySelectorAll(selector).forEach((each) => each.setAttribute(name, value));
  }
});

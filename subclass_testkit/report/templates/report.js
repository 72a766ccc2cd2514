"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector) => document.querySelector(selector);
  all(".needs-js").forEach((element) => { element.hidden = false; });

  // Where the page's address leads to a check or a group, open all that is around it.
  const reveal = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let e = target; e; e = e.parentElement) { e.hidden = false; if (e.tagName === "DETAILS") e.open = true; }
    target.scrollIntoView();
    if (target.tagName === "DETAILS") target.querySelector("summary").focus({ preventScroll: true });
  };
  addEventListener("hashchange", reveal);
  all('a[href^="#"]').forEach((link) => link.addEventListener("click", () => {
    if (link.getAttribute("href") === location.hash) reveal();
  }));

  const checks = all(".check").map((element) => ({ element, text: element.textContent.toLowerCase(), ...element.dataset }));
  const search = one("#search"), subject = one("#subject"), group = one("#group"), shown = one("#shown");
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const statuses = new Set(all('[name="status"]:checked').map((box) => box.value));
    let count = 0;
    for (const check of checks) {
      const fits = statuses.has(check.status) && (!group.value || check.group === group.value)
        && (!subject || !subject.value || check.subject === subject.value) && words.every((word) => check.text.includes(word));
      check.element.hidden = !fits;
      count += fits;
    }
    for (const section of all(".group")) section.hidden = !section.querySelector(".check:not([hidden])");
    for (const section of all(".subject")) section.hidden = Boolean(subject && subject.value && section.id !== subject.value);
    if (words.length) for (const section of all(".group:not([hidden])")) section.open = true;
    shown.textContent = `${count} of ${checks.length} checks`;
  };
  one(".filters").addEventListener("input", filter);
  one(".filters").addEventListener("submit", (event) => event.preventDefault());

  const expand = one("#expand");
  expand.addEventListener("click", () => {
    const open = expand.getAttribute("aria-pressed") !== "true";
    expand.setAttribute("aria-pressed", String(open));
    expand.textContent = open ? "Collapse all" : "Expand all";
    all(".group").forEach((details) => { details.open = open; });
    all('.check[data-status="fail"]').forEach((details) => { details.open = open; });
  });

  addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) { event.preventDefault(); search.focus(); }
    if (event.key === "Escape" && document.activeElement === search) { search.value = ""; filter(); search.blur(); }
  });

  const copied = async (text) => {
    try { await navigator.clipboard.writeText(text); return true; } catch { /* a file:// page may have no clipboard */ }
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  all(".copy").forEach((button) => button.addEventListener("click", async () => {
    const done = await copied(button.closest(".script").querySelector("pre").textContent);
    button.textContent = done ? "Copied" : "Select and copy by hand";
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  }));

  const theme = one("#theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  label();
  filter();
  reveal();
})();

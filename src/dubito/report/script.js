"use strict";
// Tables: a click on a heading sorts, again turns the order; failures stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.cells[column];
        return cell === undefined ? null : cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
      };
      const rows = [...body.rows].sort((a, b) => {
        const failed = a.classList.contains("failed") - b.classList.contains("failed");
        if (failed) return failed;
        const [x, y] = [key(a), key(b)];
        const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
        return up ? order : -order;
      });
      body.append(...rows);
    });
  });
}

// Which methods are shown.
const boxes = [...document.querySelectorAll(".pick input")];
const all = document.querySelector(".pick .all");
if (all) {
  all.hidden = false;
  all.addEventListener("click", (event) => {
    const show = event.target.dataset.show;
    if (show) for (const box of boxes) box.checked = show === "all";
  });
}

// Light or dark.
const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

// Charts: the nearest point answers.
const tip = document.getElementById("tip");
const value = (scale, share) => {
  const [low, high, kind, percent] = scale.split(" ");
  const found = kind === "log" ? low * Math.pow(high / low, share) : Number(low) + share * (high - low);
  const text = (number) => number.toLocaleString("en", { maximumSignificantDigits: 3 });
  return percent === "1" ? `${text(100 * found)}%` : text(found);
};
const points = (svg) => {
  const found = [];
  for (const group of svg.querySelectorAll("g.m")) {
    if (getComputedStyle(group).display === "none") continue;
    for (const mark of group.querySelectorAll("circle, .mark, polyline, .inside, .outside, .cloud")) {
      const add = (x, y) => found.push({ x, y, group, tip: mark.dataset.tip });
      if (mark.tagName === "circle") add(mark.cx.baseVal.value, mark.cy.baseVal.value);
      else if (mark.classList.contains("mark")) add(Number(mark.dataset.x), Number(mark.dataset.y));
      else if (mark.tagName === "path") for (const spot of mark.getAttribute("d").slice(1).split("M")) add(...spot.replace("h0", "").split(" ").map(Number));
      else for (const point of mark.points) add(point.x, point.y);
    }
  }
  return found;
};
const place = (x, y) => {
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18}px`;
};
let lit = null;
const clear = () => {
  tip.hidden = true;
  if (lit) lit.remove();
  lit = null;
};
for (const svg of document.querySelectorAll("svg[data-box]")) {
  const [left, right, top, bottom] = svg.dataset.box.split(" ").map(Number);
  const answer = (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    let best = null;
    let least = 30 * 30;
    for (const point of points(svg)) {
      const far = (point.x - at.x) ** 2 + (point.y - at.y) ** 2;
      if (far < least) [best, least] = [point, far];
    }
    clear();
    if (!best) return;
    const name = document.createElement("b");
    name.textContent = best.group.dataset.name;
    const told = best.tip || `${svg.dataset.xtitle}: ${value(svg.dataset.x, (best.x - left) / (right - left))}\n${svg.dataset.ytitle}: ${value(svg.dataset.y, (bottom - best.y) / (bottom - top))}`;
    tip.replaceChildren(name, ...told.split("\n").flatMap((line) => [document.createElement("br"), line]));
    place(event.clientX, event.clientY);
    lit = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    lit.setAttribute("class", "lit");
    lit.setAttribute("cx", best.x);
    lit.setAttribute("cy", best.y);
    lit.setAttribute("r", 5);
    best.group.append(lit);
  };
  svg.addEventListener("pointermove", answer);
  svg.addEventListener("pointerdown", answer);
  svg.addEventListener("pointerleave", clear);
}

// Words that explain themselves: to a pointer, a key or a finger; Escape closes.
for (const word of document.querySelectorAll("[title]")) {
  const told = word.title;
  word.removeAttribute("title");
  (word.querySelector("button") || word).setAttribute("aria-description", told);
  const tell = () => {
    clear();
    tip.textContent = told;
    const box = word.getBoundingClientRect();
    place(box.left - 14, box.bottom - 12);
  };
  for (const kind of ["pointerenter", "focusin", "click"]) word.addEventListener(kind, tell);
  for (const kind of ["pointerleave", "focusout"]) word.addEventListener(kind, clear);
}
addEventListener("keydown", (event) => event.key === "Escape" && clear());
addEventListener("scroll", clear, { passive: true });

"use strict";
// Opens what a link points at, and filters the flips. Everything is readable without it.
(() => {
  const reveal = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();
  for (const form of document.querySelectorAll("form.filters")) {
    form.hidden = false;
    const flips = [...document.getElementById(form.dataset.list).querySelectorAll(".flip")];
    const count = form.querySelector("output");
    const apply = () => {
      const wanted = [...form.elements].filter((e) => e.name && e.value).map((e) => [e.name, e.value]);
      let shown = 0;
      for (const flip of flips) {
        flip.hidden = !wanted.every(([name, value]) => (` ${flip.dataset[name]} `).includes(` ${value} `));
        if (!flip.hidden) shown += 1;
      }
      count.textContent = `${shown} of ${flips.length} shown`;
    };
    form.addEventListener("input", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.querySelector("button").addEventListener("click", () => {
      const open = flips.some((flip) => !flip.hidden && !flip.open);
      for (const flip of flips) if (!flip.hidden) flip.open = open;
    });
    apply();
  }
})();

// Shows the values of every chart at the pointer, or at the step chosen with the arrow keys.
"use strict";
for (const figure of document.querySelectorAll(".chart")) {
  const source = figure.querySelector("script");
  if (!source) continue;
  const { steps, series } = JSON.parse(source.textContent);
  const plot = figure.querySelector(".plot");
  const cursor = figure.querySelector(".cursor");
  const output = figure.querySelector("output");
  const first = steps[0];
  const span = steps[steps.length - 1] - first;
  let current = steps.length - 1;

  const show = (index) => {
    current = Math.max(0, Math.min(steps.length - 1, index));
    const parts = series
      .filter(({ values }) => values[current] !== null)
      .map(({ name, values }) => `${name} ${Number(values[current].toPrecision(4))}`);
    output.textContent = [`step ${steps[current]}`, ...(parts.length ? parts : ["not measured"])].join(" · ");
    cursor.style.left = `${span ? (100 * (steps[current] - first)) / span : 50}%`;
    cursor.hidden = false;
  };
  const hide = () => {
    output.textContent = "";
    cursor.hidden = true;
  };
  const nearest = (step) => {
    let best = 0;
    steps.forEach((value, index) => {
      if (Math.abs(value - step) < Math.abs(steps[best] - step)) best = index;
    });
    return best;
  };

  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    show(nearest(first + (span * (event.clientX - box.left)) / box.width));
  });
  plot.addEventListener("pointerleave", hide);
  figure.addEventListener("focus", () => show(current));
  figure.addEventListener("blur", hide);
  figure.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(current + move);
  });
}

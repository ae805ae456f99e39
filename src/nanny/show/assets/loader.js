"use strict";
// Reading what was deflated and put into base64, and plotly.js last: the words are on the screen before it is parsed.

async function inflated(base64) {
  const text = atob(base64), packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

const nonce = document.currentScript.nonce;

// A page that nobody looks at gets no frames, so the wait for one is short.
const painted = () => new Promise((done) => (requestAnimationFrame(() => setTimeout(done)), setTimeout(done, 150)));

async function loadPlotly() {
  await painted();
  const script = document.createElement("script"), embedded = document.getElementById("plotly");
  script.nonce = nonce;
  if (embedded) {
    script.textContent = new TextDecoder().decode(await inflated(embedded.textContent));
    document.head.append(script);
    return;
  }
  script.src = "plotly.js";
  await new Promise((done, fail) => {
    script.onload = done;
    script.onerror = () => fail(new Error("plotly.js"));
    document.head.append(script);
  });
}

// On paper a figure is as wide as the page: the style sheet shrinks it, and its box says of what.
const drawings = () => document.querySelectorAll(".main-svg");
addEventListener("beforeprint", () => drawings().forEach((one) => one.setAttribute("viewBox", `0 0 ${one.getAttribute("width")} ${one.getAttribute("height")}`)));
addEventListener("afterprint", () => drawings().forEach((one) => one.removeAttribute("viewBox")));

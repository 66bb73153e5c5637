// The charts of a run: speed over time, acceptance by depth, and draft tokens per round.

import { depthsOf } from "./lane.js";

const HEIGHT = 190;
const MOST_DEPTHS = 16;
const STEADY = 4; // the mean speed over fewer tokens is too noisy to show

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axis(label, more = {}) {
  return { stroke: colour("--soft"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false }, font: "12px system-ui", labelFont: "12px system-ui", label, labelSize: 22, size: 42, ...more };
}

const bars = (size) => uPlot.paths.bars({ size: [size, 60], radius: 0.15 });

// Draws two lanes into three charts. `update` may be called for every chunk; it draws at most once per frame.
export class Charts {
  constructor(drafted, plain) {
    this.lanes = [drafted, plain];
    this.plots = [];
    this.waiting = false;
    this.until = Infinity;
    new ResizeObserver(() => this.fit()).observe(document.querySelector(".charts"));
    this.build();
  }

  // Create the charts again, for another theme.
  build() {
    for (const plot of this.plots) plot.destroy();
    const whole = (_, values) => values.map((value) => (Number.isInteger(value) ? value : ""));
    const line = (label, name) => ({ label, stroke: colour(name), width: 2, points: { show: false }, spanGaps: true });
    this.plots = [
      this.plot("chart-speed", [{}, line("drafted", "--drafted"), line("plain", "--plain")], [axis("seconds", { size: 34 }), axis("")]),
      this.plot("chart-depth", [{}, { label: "accepted", fill: colour("--drafted"), stroke: colour("--drafted"), paths: bars(0.6), points: { show: false } }],
        [axis("depth", { size: 34, values: whole, incrs: [1, 2, 4] }), axis("", { values: (_, v) => v.map((x) => `${Math.round(100 * x)} %`) })], { x: { time: false, range: (_, low, high) => [0.5, Math.max(4, high ?? 4) + 0.5] }, y: { range: [0, 1] } }),
      this.plot("chart-rounds", [{}, { label: "drafted", fill: colour("--rejected-fill"), stroke: colour("--rejected-fill"), paths: bars(0.8), points: { show: false } },
        { label: "accepted", fill: colour("--drafted"), stroke: colour("--drafted"), paths: bars(0.8), points: { show: false } }],
        [axis("round", { size: 34, values: whole, incrs: [1, 2, 5, 10, 20, 50, 100, 200] }), axis("", { values: whole, incrs: [1, 2, 4, 8, 16] })], { x: { time: false, range: (_, low, high) => [0.4, Math.max(10, high ?? 10) + 0.6] }, y: { range: (_, low, high) => [0, Math.max(4, high ?? 4)] } }),
    ];
    this.draw();
  }

  plot(id, series, axes, scales = { x: { time: false, range: (_, low, high) => [0, Math.max(high ?? 0, 0.5)] }, y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1) * 1.08] } }) {
    const place = document.getElementById(id);
    const options = { width: place.clientWidth || 300, height: HEIGHT, legend: { show: false }, cursor: { show: false }, series, axes, scales, padding: [8, 8, 0, 0] };
    return new uPlot(options, [[], ...series.slice(1).map(() => [])], place);
  }

  fit() {
    for (const plot of this.plots) {
      const width = plot.root.parentElement.clientWidth;
      if (width > 0 && width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  }

  // Draw in the next frame; with `until` only what had arrived that many ms after the requests.
  update(until = Infinity) {
    this.until = until;
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  draw() {
    const [speed, depth, rounds] = this.plots;
    const seen = this.lanes.map((lane) => lane.marks.filter((mark) => mark.ms <= this.until));
    const points = this.lanes.map((lane, i) => seen[i].map((mark) => [mark.ms / 1000, (mark.num > STEADY && lane.rate(mark.num, mark.ms)) || null]));
    const times = [...new Set(points.flat().map(([time]) => time))].sort((a, b) => a - b);
    const maps = points.map((pairs) => new Map(pairs));
    speed.setData([times, ...maps.map((map) => times.map((time) => (map.has(time) ? map.get(time) : undefined)))]);
    const shown = this.lanes[0].rounds.filter((round) => round.ms <= this.until);
    const rates = acceptance(shown);
    depth.setData([rates.map((_, i) => i + 1), rates]);
    rounds.setData([shown.map((round) => round.round), shown.map((round) => round.guesses.length), shown.map((round) => depthsOf(round).accepted)]);
  }

  // Set the text alternatives of the charts, after a run.
  describe() {
    const say = (id, text) => document.getElementById(id).setAttribute("aria-label", text);
    const speeds = this.lanes.filter((lane) => lane.speedText()).map((lane) => `${lane.title}: ${lane.speedText()}`);
    say("chart-speed", speeds.join("; ") || "No speed yet");
    const rounds = this.lanes[0].rounds;
    const rates = acceptance(rounds).map((rate, i) => `depth ${i + 1}: ${Math.round(100 * rate)} percent`);
    say("chart-depth", rates.join(", ") || "Nothing was drafted");
    const drafted = rounds.reduce((sum, round) => sum + round.guesses.length, 0);
    const accepted = rounds.reduce((sum, round) => sum + depthsOf(round).accepted, 0);
    say("chart-rounds", `${drafted} draft tokens in ${rounds.length} rounds, ${accepted} of them accepted`);
  }
}

// P(the draft token at depth j is accepted | the one before it was accepted), from depth 1.
export function acceptance(rounds) {
  const offered = [];
  const accepted = [];
  for (const round of rounds) {
    const depths = depthsOf(round);
    for (let depth = 0; depth < Math.min(depths.offered, MOST_DEPTHS); depth++) {
      offered[depth] = (offered[depth] ?? 0) + 1;
      accepted[depth] = (accepted[depth] ?? 0) + (depth < depths.accepted ? 1 : 0);
    }
  }
  return offered.map((count, depth) => accepted[depth] / count);
}

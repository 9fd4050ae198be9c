import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { Report } from "../schema";
import { useMedia, type Change, type State } from "../shared/hooks";
import { number, plural } from "../shared/words";
import { lines, sections, type Band, type Line } from "./curves";
import { describe } from "./metrics";
import { gather } from "./rows";

const COLOURS = 8;
const HEIGHT = 184;
/** Of the first eight lines, the next eight, and so on. */
const DASHES = [[], [7, 4], [2, 3]];
const SMOOTH = [1, 3, 5, 10, 25, 50, 100];
/** Values that a chart tells in its heading. */
const MOST_VALUES = 8;

export function Curves({ report, state, change }: { report: Report; state: State; change: Change }) {
  const runs = useMemo(() => report.runs.filter((run) => run.metrics), [report]);
  const groups = useMemo(() => gather(runs, (run) => run.group), [runs]);
  const hidden = useMemo(() => new Set((state.hide ?? "").split(",").filter(Boolean).map((place) => groups[Number(place)]?.[0] ?? "")), [state.hide, groups]);
  const band: Band = state.band === "95" ? "95" : "range";
  const width = SMOOTH.find((steps) => String(steps) === state.smooth) ?? 1;
  const shown = sections(runs, state.m);
  const toggle = (place: number) => {
    const off = groups.flatMap(([group], index) => (hidden.has(group) !== (index === place) ? [index] : []));
    change({ hide: off.join(",") }, "same");
  };
  return (
    <section aria-label="Curves" class="curves">
      <div class="legend-of-runs" role="group" aria-label="Runs">
        {groups.map(([group, members], place) => (
          <button key={group} type="button" aria-pressed={!hidden.has(group)} onClick={() => toggle(place)}>
            <Swatch place={place} />{group}{members.length > 1 && <span class="muted"> {plural(members.length, "seed")}</span>}
          </button>
        ))}
      </div>
      <div class="controls">
        {groups.length > 3 && (
          <span class="segments" role="group" aria-label="Show runs">
            <button type="button" onClick={() => change({ hide: null }, "same")}>All runs</button>
            <button type="button" onClick={() => change({ hide: groups.map((_, place) => place).join(",") }, "same")}>None</button>
          </span>
        )}
        <label class="wide">Metrics <input type="search" value={state.m ?? ""} placeholder="part of a name" onInput={(event) => change({ m: event.currentTarget.value }, "same")} /></label>
        <label>Smooth <select value={String(width)} onChange={(event) => change({ smooth: event.currentTarget.value === "1" ? null : event.currentTarget.value }, "same")}>
          {SMOOTH.map((steps) => <option key={steps} value={String(steps)}>{steps === 1 ? "off" : `mean of ${steps} steps`}</option>)}
        </select></label>
        {groups.some(([, members]) => members.length > 1) && (
          <label>Band <select value={band} onChange={(event) => change({ band: event.currentTarget.value === "95" ? "95" : null }, "same")}>
            <option value="range">lowest to highest</option>
            <option value="95">95 % of the mean</option>
          </select></label>
        )}
        <span class="muted">Drag over a curve to zoom, double-click to see all of it; arrow keys go from step to step.</span>
      </div>
      <div class="sections">
        {shown.map(([title, names]) => <Section key={`${title}${state.m ? " found" : ""}`} title={title} names={names} open={title !== "More" || Boolean(state.m)} chart={(name) => <Chart key={name} name={name} {...lines(groups, hidden, name, band, width)} />} />)}
      </div>
      {!shown.length && <p class="empty">No metric has that in its name.</p>}
    </section>
  );
}

function Section({ title, names, open, chart }: { title: string; names: string[]; open: boolean; chart: (name: string) => preact.JSX.Element }) {
  const [shown, setShown] = useState(open);
  return (
    <details class={open ? "section" : "section last"} open={open} style={{ "--four": open ? Math.min(4, names.length) : 4, "--two": open ? Math.min(2, names.length) : 2 }} onToggle={(event) => setShown(event.currentTarget.open)}>
      <summary><h2>{title}</h2> <span class="muted">{names.length}</span></summary>
      {shown && <div class="charts">{names.map(chart)}</div>}
    </details>
  );
}

/** The colour of a line, and its dashes. */
const Swatch = ({ place }: { place: number }) => <i class={`swatch s${place % COLOURS} d${Math.floor(place / COLOURS) % DASHES.length}`} />;

/** A scale that leaves room around a line that is level: uPlot's own makes 0 to 100 of nothing but zeros. */
const range = (_: uPlot, low: number | null, high: number | null): uPlot.Range.MinMax => {
  if (low === null || high === null) return [null, null];
  if (low === high) return low === 0 ? [-0.1, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
  return uPlot.rangeNum(low, high, 0.1, true);
};

/** One metric: a line for each group of runs. */
function Chart({ name, steps, lines }: { name: string; steps: number[]; lines: Line[] }) {
  const box = useRef<HTMLDivElement>(null);
  const dark = useMedia("(prefers-color-scheme: dark)");
  const { unit, meaning } = describe(name);
  const [index, setIndex] = useState<number | null>(null);
  const plot = useRef<uPlot | null>(null);
  const data: uPlot.AlignedData = [steps, ...lines.flatMap(({ mean, low, high }) => [mean, high, low])];
  const shape = JSON.stringify([lines.map(({ place }) => place), steps.length < 3, dark]);
  useEffect(() => {
    const element = box.current;
    if (!element || !lines.length) return;
    const style = getComputedStyle(element);
    const colour = (place: number) => style.getPropertyValue(`--s${place % COLOURS}`).trim();
    const [ink, grid] = [style.getPropertyValue("--muted"), style.getPropertyValue("--line")];
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui", labelFont: "11px system-ui" };
    const edge = (): uPlot.Series => ({ points: { show: false } }); // a step that only one seed has a value for has no band
    const room = (values: string[] | null) => 18 + 7 * Math.max(3, ...(values ?? []).map((value) => value.length));
    const made = new uPlot(
      {
        width: element.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        cursor: { sync: { key: "steps" }, y: false, drag: { x: true, y: false } },
        scales: { x: { time: false }, y: { range } },
        axes: [
          { ...axis, size: 26, label: "step", labelSize: 14, labelGap: 0, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6] },
          { ...axis, size: (_, values) => room(values), values: (_, values) => values.map((value) => number(Number(value.toPrecision(12)))) },
        ],
        series: [{}, ...lines.flatMap(({ place }) => [{ stroke: colour(place), width: 2, dash: DASHES[Math.floor(place / COLOURS) % DASHES.length], spanGaps: true, points: { show: steps.length < 3 } }, edge(), edge()])],
        bands: lines.map(({ place }, index) => ({ series: [3 * index + 2, 3 * index + 3], fill: `${colour(place)}${lines.length > MOST_VALUES ? "0d" : "33"}` })),
        hooks: { setCursor: [(plot) => setIndex(plot.cursor.idx ?? null)] },
      },
      data,
      element,
    );
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: HEIGHT }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    const made = plot.current;
    if (!made || made.data === data) return;
    const [{ min, max }, all] = [made.scales.x, made.data[0]];
    const zoomed = min !== undefined && max !== undefined && (min > all[0] || max < all[all.length - 1]);
    made.setData(data, !zoomed);
    if (zoomed) made.setScale("x", { min, max }); // new values of a run that goes on leave the view as it is
  }, [JSON.stringify(data)]);
  const onKeyDown = (event: KeyboardEvent) => {
    const made = plot.current;
    const moves: Record<string, number> = { ArrowRight: 1, ArrowLeft: -1 };
    if (!made || !(event.key in moves)) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(steps.length - 1, (index ?? steps.length) + moves[event.key]));
    made.setCursor({ left: made.valToPos(steps[next], "x"), top: 0 });
  };
  const at = index !== null && index < steps.length ? index : null;
  const last = (line: Line) => line.mean.findLast((value) => value !== null) ?? null;
  const said = lines.map((line) => `${line.group} from ${number(line.mean.find((value) => value !== null))} to ${number(last(line))}`);
  return (
    <figure class="chart">
      <figcaption>
        <b>{name}</b>{unit && <span class="muted">, {unit}</span>} <span class="muted when">{at === null ? "last" : `step ${steps[at]}`}</span>
        <span class="muted meaning">{meaning}</span>
        <span class="values">
          {lines.slice(0, MOST_VALUES).map((line) => <span key={line.group} title={line.group}><Swatch place={line.place} />{number(at === null ? last(line) : line.mean[at])}</span>)}
          {lines.length > MOST_VALUES && <span class="muted">and {number(lines.length - MOST_VALUES)} more</span>}
        </span>
      </figcaption>
      <div ref={box} role="img" tabIndex={0} onKeyDown={onKeyDown} aria-label={lines.length ? `${name} over steps: ${said.join("; ")}` : `${name}: no run is shown`} />
      {!lines.length && <p class="empty">No run that is shown has it.</p>}
    </figure>
  );
}

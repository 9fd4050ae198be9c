import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { Report } from "../schema";
import { useMedia, type Change, type State } from "../shared/hooks";
import { number, plural } from "../shared/words";
import { lines, sections, type Band, type Line } from "./curves";
import { gather } from "./rows";

const COLOURS = 8;
const HEIGHT = 170;

export function Curves({ report, state, change }: { report: Report; state: State; change: Change }) {
  const runs = useMemo(() => report.runs.filter((run) => run.metrics), [report]);
  const groups = useMemo(() => gather(runs, (run) => run.group), [runs]);
  const hidden = useMemo(() => new Set((state.hide ?? "").split(",").filter(Boolean).map((place) => groups[Number(place)]?.[0] ?? "")), [state.hide, groups]);
  const band: Band = state.band === "95" ? "95" : "range";
  const toggle = (place: number) => {
    const off = groups.flatMap(([group], index) => (hidden.has(group) !== (index === place) ? [index] : []));
    change({ hide: off.join(",") }, "same");
  };
  return (
    <section aria-label="Curves" class="curves">
      <div class="legend-of-runs" role="group" aria-label="Runs">
        {groups.map(([group, members], place) => (
          <button key={group} type="button" aria-pressed={!hidden.has(group)} onClick={() => toggle(place)}>
            <i class={`swatch s${place % COLOURS}`} />{group}{members.length > 1 && <span class="muted"> {plural(members.length, "seed")}</span>}
          </button>
        ))}
        <span class="muted">Drag over a curve to zoom, double-click to see all of it.</span>
        {groups.some(([, members]) => members.length > 1) && (
          <label>Band <select value={band} onChange={(event) => change({ band: event.currentTarget.value === "95" ? "95" : null }, "same")}>
            <option value="range">lowest to highest</option>
            <option value="95">95 % of the mean</option>
          </select></label>
        )}
      </div>
      <div class="sections">
        {sections(runs).map(([title, names]) => <Section key={title} title={title} names={names} open={title !== "More"} chart={(name) => <Chart key={name} name={name} {...lines(groups, hidden, name, band)} />} />)}
      </div>
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

/** One metric: a line for each group of runs. */
function Chart({ name, steps, lines }: { name: string; steps: number[]; lines: Line[] }) {
  const box = useRef<HTMLDivElement>(null);
  const dark = useMedia("(prefers-color-scheme: dark)");
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
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui" };
    const edge = (): uPlot.Series => ({ points: { show: false }, spanGaps: true });
    const made = new uPlot(
      {
        width: element.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        cursor: { sync: { key: "steps" }, y: false, drag: { x: true, y: false } },
        scales: { x: { time: false } },
        axes: [{ ...axis, size: 26 }, { ...axis, size: 48, values: (_, values) => values.map((value) => number(value)) }],
        series: [{}, ...lines.flatMap(({ place }) => [{ stroke: colour(place), width: 2, spanGaps: true, points: { show: steps.length < 3 } }, edge(), edge()])],
        bands: lines.map(({ place }, index) => ({ series: [3 * index + 2, 3 * index + 3], fill: `${colour(place)}33` })),
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
  const at = index !== null && index < steps.length ? index : null;
  const last = (line: Line) => line.mean.findLast((value) => value !== null) ?? null;
  const said = lines.map((line) => `${line.group} from ${number(line.mean.find((value) => value !== null))} to ${number(last(line))}`);
  return (
    <figure class="chart">
      <figcaption>
        <b>{name}</b> <span class="muted">{at === null ? "last" : `step ${steps[at]}`}</span>
        <span class="values">{lines.map((line) => <span key={line.group}><i class={`swatch s${line.place % COLOURS}`} />{number(at === null ? last(line) : line.mean[at])}</span>)}</span>
      </figcaption>
      <div ref={box} role="img" aria-label={lines.length ? `${name} over steps: ${said.join("; ")}` : `${name}: no run is shown`} />
      {!lines.length && <p class="empty">No run that is shown has it.</p>}
    </figure>
  );
}

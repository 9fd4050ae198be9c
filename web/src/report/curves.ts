// From the metrics of runs to the lines of charts. Pure functions.
import type { Run } from "../schema";
import { gather } from "./rows";

export interface Line {
  group: string;
  /** Of the group among all groups: its colour. */
  place: number;
  runs: number;
  mean: (number | null)[];
  low: (number | null)[];
  high: (number | null)[];
}

export type Band = "range" | "95";

export const SECTIONS: [string, RegExp][] = [
  ["Rewards", /^reward/],
  ["Format", /^(f_|junk$|format)/],
  ["Calls (kappa)", /^(kappa|attempts)/],
  ["Accuracy", /^(accuracy|true_reports)/],
  ["Loss", /loss|perplexity/],
  ["Entropy", /entropy/],
  ["KL", /kl(_|$)/],
  ["Mismatch", /mismatch|importance|truncated/],
  ["Staleness", /^stale/],
  ["Throughput", /per_second|throughput|^rollout$|^learn$|seconds$/],
];

/** Names of metrics by section, those of no section under "More". A metric without a single value is left out. */
export function sections(runs: Run[]): [string, string[]][] {
  const names = new Set<string>();
  for (const run of runs) for (const [name, values] of Object.entries(run.metrics?.values ?? {})) if (values.some((value) => value !== null)) names.add(name);
  const sectionOf = (name: string) => SECTIONS.find(([, pattern]) => pattern.test(name))?.[0] ?? "More";
  const order = [...SECTIONS.map(([title]) => title), "More"];
  return gather([...names], sectionOf).sort(([a], [b]) => order.indexOf(a) - order.indexOf(b));
}

/** 97.5 % points of Student's t for 1, 2, ... degrees of freedom. */
const T = [12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228];

function spread(values: number[], band: Band): [number, number] | [null, null] {
  if (values.length < 2) return [null, null];
  if (band === "range") return [Math.min(...values), Math.max(...values)];
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const variance = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1);
  const half = (T[values.length - 2] ?? 1.96) * Math.sqrt(variance / values.length);
  return [mean - half, mean + half];
}

/** One line for each group of runs: the mean at each step over the runs that have a value there, and its band. */
export function lines(groups: [string, Run[]][], hidden: Set<string>, metric: string, band: Band): { steps: number[]; lines: Line[] } {
  const shown = groups.map(([group, runs], place) => ({ group, runs, place })).filter(({ group }) => !hidden.has(group));
  const columns = shown.map(({ runs }) => {
    const at = new Map<number, number[]>();
    for (const { metrics } of runs) {
      if (!metrics || !Object.hasOwn(metrics.values, metric)) continue;
      metrics.values[metric].forEach((value, index) => {
        const step = metrics.step[index];
        if (value !== null) at.set(step, [...(at.get(step) ?? []), value]);
      });
    }
    return at;
  });
  const steps = [...new Set(columns.flatMap((at) => [...at.keys()]))].sort((a, b) => a - b);
  const out = shown.map(({ group, runs, place }, index): Line => {
    const values = steps.map((step) => columns[index].get(step) ?? []);
    const bands = values.map((each) => spread(each, band));
    return {
      group, place, runs: runs.length,
      mean: values.map((each) => (each.length ? each.reduce((sum, value) => sum + value, 0) / each.length : null)),
      low: bands.map(([low]) => low),
      high: bands.map(([, high]) => high),
    };
  });
  return { steps, lines: out.filter((line) => line.mean.some((value) => value !== null)) };
}

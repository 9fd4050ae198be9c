// From the metrics of runs to the lines of charts. Pure functions.
import type { Run } from "../schema";
import { gather, mean } from "./rows";

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

/** Of "kappa/K16" the 16; those of the whole batch come before those of a K. */
const budget = (name: string) => Number(/\/K(\d+)$/.exec(name)?.[1] ?? 0);

/**
 * Names of metrics by section, those of no section under "More". A metric without a single value is left out, and so
 * is one whose name lacks a word of the filter.
 */
export function sections(runs: Run[], filter = ""): [string, string[]][] {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const names = new Set<string>();
  for (const run of runs) for (const [name, values] of Object.entries(run.metrics?.values ?? {})) if (values.some((value) => value !== null)) names.add(name);
  const sectionOf = (name: string) => SECTIONS.find(([, pattern]) => pattern.test(name))?.[0] ?? "More";
  const order = [...SECTIONS.map(([title]) => title), "More"];
  const kept = [...names].filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  return gather(kept.sort((a, b) => budget(a) - budget(b)), sectionOf).sort(([a], [b]) => order.indexOf(a) - order.indexOf(b));
}

/** The mean of each value and its neighbours, `width` together, without those that are missing. */
export function smooth(values: (number | null)[], width: number): (number | null)[] {
  const half = Math.floor(width / 2);
  return width < 2 ? values : values.map((_, at) => mean(values.slice(Math.max(0, at - half), at + half + 1)));
}

/** 97.5 % points of Student's t for 1, 2, ... degrees of freedom. */
const T = [
  12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131,
  2.12, 2.11, 2.101, 2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045, 2.042,
];

function spread(values: number[], band: Band): [number, number] | [null, null] {
  if (values.length < 2) return [null, null];
  if (band === "range") return [Math.min(...values), Math.max(...values)];
  const middle = values.reduce((sum, value) => sum + value, 0) / values.length;
  const variance = values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1);
  const half = T[Math.min(values.length - 1, T.length) - 1] * Math.sqrt(variance / values.length);
  return [middle - half, middle + half];
}

/**
 * One line for each group of runs: the mean at each step over the runs that have a value there, and its band. Each run
 * is smoothed by itself, over `width` of its steps.
 */
export function lines(groups: [string, Run[]][], hidden: Set<string>, metric: string, band: Band, width: number): { steps: number[]; lines: Line[] } {
  const shown = groups.map(([group, runs], place) => ({ group, runs, place })).filter(({ group }) => !hidden.has(group));
  const columns = shown.map(({ runs }) => {
    const at = new Map<number, number[]>();
    for (const { metrics } of runs) {
      if (!metrics || !Object.hasOwn(metrics.values, metric)) continue;
      smooth(metrics.values[metric], width).forEach((value, index) => {
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
      mean: values.map(mean),
      low: bands.map(([low]) => low),
      high: bands.map(([, high]) => high),
    };
  });
  return { steps, lines: out.filter((line) => line.mean.some((value) => value !== null)) };
}

// The episodes of all runs as one list: filtered, sorted, grouped. Pure functions.
import type { EpisodeRow, Report, Run } from "../schema";
import type { State } from "../shared/hooks";

export type Mark = "right" | "wrong" | "unscored";

export interface Row extends EpisodeRow {
  run: Run;
  /** Unique in the report. */
  ref: string;
  mark: Mark;
  /** What was paid, or the accuracy where nothing was. */
  reward: number | null;
  /** All that the text filter looks at, in small letters. */
  haystack: string;
}

/** The rollouts of one prompt in one step, in one run. */
export interface Group {
  ref: string;
  rows: Row[];
}

export const makeRef = (run: string, id: string) => `${encodeURIComponent(run)}/${encodeURIComponent(id)}`;

export function allRows(report: Report): Row[] {
  return report.runs.flatMap((run) =>
    run.episodes.map((row) => {
      const accuracy = row.rewards.accuracy ?? null;
      const mark: Mark = accuracy === null ? "unscored" : accuracy >= 0.5 ? "right" : "wrong";
      const reward = "total" in row.rewards ? row.rewards.total : accuracy;
      const haystack = [run.name, row.question, row.answer, row.truth, row.id, row.sample, ...row.failures].join("\n").toLowerCase();
      return { ...row, run, ref: makeRef(run.id, row.id), mark, reward, haystack };
    }),
  );
}

/** In the order of their first rows; see `sortGroups`. */
export const byGroup = (rows: Row[]): Group[] => gather(rows, (row) => makeRef(row.run.id, row.group)).map(([ref, rows]) => ({ ref, rows }));

export function gather<T>(items: T[], key: (item: T) => string): [string, T[]][] {
  const out = new Map<string, T[]>();
  for (const item of items) {
    const name = key(item);
    const held = out.get(name);
    if (held) held.push(item);
    else out.set(name, [item]);
  }
  return [...out];
}

export const mean = (values: (number | null)[]): number | null => {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
};

/** Filters that are choices: the key in the page's state, its label, and what a row has there. */
export const FILTERS: { key: string; label: string; values: (row: Row) => string[] }[] = [
  { key: "run", label: "Run", values: (row) => [row.run.name] },
  { key: "step", label: "Step", values: (row) => (row.step === null ? [] : [String(row.step)]) },
  { key: "k", label: "K", values: (row) => [String(row.frame_budget)] },
  { key: "dispatch", label: "Dispatch", values: (row) => [row.dispatch] },
  { key: "mark", label: "Answer", values: (row) => [row.mark] },
  { key: "kind", label: "Format", values: (row) => (row.failures.length ? row.failures : ["strict"]) },
  { key: "calls", label: "Calls", values: (row) => [String(row.calls)] },
  { key: "end", label: "End", values: (row) => [row.end] },
];

export const SORTS: { key: string; label: string; value: (row: Row) => number | string | null }[] = [
  { key: "answer", label: "Answer", value: (row) => row.mark },
  { key: "question", label: "Question", value: (row) => row.question },
  { key: "step", label: "Step", value: (row) => row.step },
  { key: "k", label: "K", value: (row) => row.frame_budget },
  { key: "calls", label: "Calls", value: (row) => row.calls },
  { key: "kind", label: "Format", value: (row) => row.failures.join() || null },
  { key: "reward", label: "Reward", value: (row) => row.reward },
  { key: "advantage", label: "Advantage", value: (row) => row.advantage },
];

/** Groups by what their lines show: means over their rows, and how many of these are right or strict. */
export function sortGroups(groups: Group[], state: State): Group[] {
  const sort = SORTS.find(({ key }) => key === state.sort);
  if (!sort) return groups;
  const value = ({ rows }: Group): number | string | null => {
    if (sort.key === "question") return rows[0].question;
    if (sort.key === "answer") return mean(rows.map((row) => (row.mark === "unscored" ? null : Number(row.mark === "right"))));
    if (sort.key === "kind") return mean(rows.map((row) => Number(row.failures.length === 0)));
    return mean(rows.map((row) => sort.value(row) as number | null));
  };
  return ordered(groups, value, Boolean(state.down));
}

/** Items without a value are last in both directions. */
export function ordered<T>(items: T[], value: (item: T) => number | string | null, down: boolean): T[] {
  const known = items.filter((item) => value(item) !== null);
  const missing = items.filter((item) => value(item) === null);
  return [...known.sort((a, b) => (down ? -1 : 1) * compare(value(a), value(b))), ...missing];
}

/** The rows that a table's row names, if the state holds one: "run/table/row". */
function linked(report: Report, link: string | undefined): { ids: Set<string>; title: string } | null {
  const [run, table, line] = (link ?? "").split("/").map(Number);
  const found = report.runs[run]?.tables[table];
  const row = found?.rows[line];
  if (!row) return null;
  return { ids: new Set((row.link ?? []).map((id) => makeRef(report.runs[run].id, id))), title: `${found.title}: ${row.cells[0] ?? ""}` };
}

export function select(report: Report, rows: Row[], state: State): { rows: Row[]; link: string | null } {
  const words = (state.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = FILTERS.filter(({ key }) => state[key]);
  const link = linked(report, state.link);
  const kept = rows.filter(
    (row) =>
      chosen.every(({ key, values }) => values(row).includes(state[key])) &&
      words.every((word) => row.haystack.includes(word)) &&
      (!link || link.ids.has(row.ref)),
  );
  const sort = SORTS.find(({ key }) => key === state.sort);
  return { rows: sort ? ordered(kept, sort.value, Boolean(state.down)) : kept, link: link && link.title };
}

export function compare(a: number | string | null, b: number | string | null): number {
  if (a === b) return 0;
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

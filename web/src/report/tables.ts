// The tables of all runs: those of one kind are one table, with the run in front. Pure functions.
import type { Cell, Report } from "../schema";
import { gather, ordered } from "./rows";

export interface Line {
  cells: Cell[];
  /** Ids of episodes. */
  link: string[];
  /** Where it is in the report: "run/table/row". */
  place: string;
  /** Of the runs of the report. */
  run: number;
}

export interface Joined {
  key: string;
  title: string;
  columns: string[];
  lines: Line[];
}

export interface Sort {
  at: number;
  down: boolean;
}

/** Tables that have the same title are one, with all columns that any of them has, in the order of the first. */
export function joined(report: Report): Joined[] {
  const all = report.runs.flatMap((run, place) => run.tables.map((table, index) => ({ run, place, table, index })));
  return gather(all, ({ table }) => table.title).map(([title, parts]) => {
    const several = parts.length > 1;
    const columns = [...new Set(parts.flatMap(({ table }) => table.columns))];
    const lines = parts.flatMap(({ run, place, table, index }) => {
      const at = columns.map((column) => table.columns.indexOf(column));
      return table.rows.map((row, line): Line => ({
        cells: [...(several ? [run.name] : []), ...at.map((from) => row.cells[from] ?? null)],
        link: row.link ?? [],
        place: `${place}/${index}/${line}`,
        run: place,
      }));
    });
    const named = several || report.runs.length === 1 ? title : `${parts[0].run.name}: ${title}`;
    return { key: title, title: named, columns: several ? ["run", ...columns] : columns, lines };
  });
}

/** The number that a cell is, or begins with ("0.52 ± 0.03"); null for other text, which may begin with digits. */
export function valueOf(cell: Cell): number | null {
  if (typeof cell === "number") return cell;
  const found = /^([-−]?\d+(?:\.\d+)?)(?: ± \d+(?:\.\d+)?)?$/.exec(cell ?? "");
  return found ? Number(found[1].replace("−", "-")) : null;
}

export const sorted = (lines: Line[], sort: Sort | null): Line[] =>
  sort ? ordered(lines, ({ cells }) => valueOf(cells[sort.at]) ?? cells[sort.at], sort.down) : lines;

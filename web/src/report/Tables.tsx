import { useMemo, useState } from "preact/hooks";
import type { Cell, Report } from "../schema";
import type { Change, State } from "../shared/hooks";
import { number, plural } from "../shared/words";
import { gather, makeRef } from "./rows";
import { joined, sorted, valueOf, type Joined, type Sort } from "./tables";

export function Tables({ report, state, change }: { report: Report; state: State; change: Change }) {
  const tables = useMemo(() => joined(report), [report]);
  const titles = gather(tables, (table) => table.title);
  const shown = titles.some(([title]) => title === state.table) ? tables.filter(({ title }) => title === state.table) : tables;
  return (
    <section aria-label="Tables" class="tables">
      <div class="controls">
        {titles.length > 1 && (
          <label>Table <select value={state.table ?? ""} onChange={(event) => change({ table: event.currentTarget.value }, "same")}>
            <option value="">all</option>
            {titles.map(([title]) => <option key={title} value={title}>{title}</option>)}
          </select></label>
        )}
        <span class="muted">A column's name sorts by it.</span>
      </div>
      {shown.map((table) => <TableView key={table.key} table={table} report={report} change={change} />)}
    </section>
  );
}

function TableView({ table, report, change }: { table: Joined; report: Report; change: Change }) {
  const [sort, setSort] = useState<Sort | null>(null);
  const lines = sorted(table.lines, sort);
  const links = lines.some(({ link }) => link.length);
  const numeric = table.columns.map((_, at) => table.lines.every(({ cells }) => cells[at] === null || valueOf(cells[at]) !== null));
  const by = (at: number) => setSort(sort?.at !== at ? { at, down: false } : sort.down ? null : { at, down: true });
  const open = ({ link, place, run }: Joined["lines"][number]) => {
    if (link.length === 1) change({ ep: makeRef(report.runs[run].id, link[0]) });
    else change({ tab: "episodes", link: place });
  };
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={table.title}>
      <table>
        <caption>{table.title}</caption>
        <thead>
          <tr>
            {table.columns.map((column, at) => (
              <th key={at} scope="col" class={numeric[at] ? "number" : ""} aria-sort={sort?.at !== at ? undefined : sort.down ? "descending" : "ascending"}>
                <button type="button" class="sorter" title={`Sort by ${column}`} onClick={() => by(at)}>{column}{sort?.at === at && (sort.down ? " ↓" : " ↑")}</button>
              </th>
            ))}
            {links && <th><span class="hidden">Episodes</span></th>}
          </tr>
        </thead>
        <tbody>
          {lines.map((line) => (
            <tr key={line.place}>
              {line.cells.map((cell, at) => <td key={at} class={numeric[at] ? "number" : table.columns[at] === "run" ? "run" : ""}>{shownCell(cell)}</td>)}
              {links && <td>{line.link.length > 0 && <button type="button" class="link" onClick={() => open(line)}>{line.link.length === 1 ? "open" : plural(line.link.length, "episode")}</button>}</td>}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const shownCell = (cell: Cell) => (typeof cell === "number" ? number(cell) : (cell ?? "–"));

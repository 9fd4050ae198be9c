import type { Report, Table } from "../schema";
import type { Change } from "../shared/hooks";
import { number, plural } from "../shared/words";
import { makeRef } from "./rows";

export function Tables({ report, change }: { report: Report; change: Change }) {
  return (
    <section aria-label="Tables" class="tables">
      {report.runs.map((run, place) =>
        run.tables.map((table, index) => (
          <TableView key={`${place}/${index}`} table={table} title={report.runs.length > 1 ? `${run.name}: ${table.title}` : table.title} onRow={(line) => {
            const link = table.rows[line].link ?? [];
            if (link.length === 1) change({ ep: makeRef(run.id, link[0]) });
            else change({ tab: "episodes", link: `${place}/${index}/${line}` });
          }} />
        )),
      )}
    </section>
  );
}

function TableView({ table, title, onRow }: { table: Table; title: string; onRow: (line: number) => void }) {
  const links = table.rows.some((row) => row.link?.length);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={title}>
      <table>
        <caption>{title}</caption>
        <thead><tr>{table.columns.map((column, index) => <th key={index} scope="col" class={typeof table.rows[0]?.cells[index] === "number" ? "number" : ""}>{column}</th>)}{links && <th></th>}</tr></thead>
        <tbody>
          {table.rows.map((row, line) => (
            <tr key={line}>
              {row.cells.map((cell, index) => <td key={index} class={typeof cell === "number" ? "number" : ""}>{typeof cell === "number" ? number(cell) : (cell ?? "–")}</td>)}
              {links && <td>{row.link?.length ? <button type="button" class="link" onClick={() => onRow(line)}>{row.link.length === 1 ? "open" : plural(row.link.length, "episode")}</button> : null}</td>}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

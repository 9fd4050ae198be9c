import { render } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Report } from "../schema";
import { loadReport } from "../shared/data";
import { useHash } from "../shared/hooks";
import { number, plural } from "../shared/words";
import "../shared/base.css";
import "../shared/episode.css";
import "./report.css";
import { Curves } from "./Curves";
import { EpisodePage } from "./EpisodePage";
import { Episodes } from "./Episodes";
import { GroupPage } from "./Group";
import { allRows, select } from "./rows";
import { joined } from "./tables";
import { Tables } from "./Tables";

const REFRESH_MS = 5000;

function App() {
  const [report, setReport] = useState<Report | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  useEffect(() => {
    let timer = 0;
    let text = "";
    const turn = async () => {
      let live = true;
      try {
        const next = await loadReport();
        const found = JSON.stringify(next);
        if (found !== text) setReport(next); // a page that shows the same stays as it is
        text = found;
        live = next.live;
        setProblem(null);
      } catch (error) {
        setProblem(error instanceof Error ? error.message : String(error));
        live = text !== "";
      }
      if (live) timer = setTimeout(turn, REFRESH_MS);
    };
    void turn();
    return () => clearTimeout(timer);
  }, []);
  if (!report) return <main class="page"><p class="empty" role="status">{problem ? `The report cannot be read: ${problem}` : "Reading the report…"}</p></main>;
  return <Page report={report} problem={problem} />;
}

function Page({ report, problem }: { report: Report; problem: string | null }) {
  const [state, change] = useHash();
  const rows = useMemo(() => allRows(report), [report]);
  const found = useMemo(() => select(report, rows, state), [report, rows, state.q, state.link, state.sort, state.down, state.run, state.step, state.k, state.dispatch, state.mark, state.kind, state.calls, state.end]);
  const last = useRef<string | null>(null);
  last.current = state.ep ?? state.group ?? last.current;
  useEffect(() => void (document.title = report.title), [report.title]);

  const tables = useMemo(() => joined(report).length, [report]);
  const tabs: [string, string][] = [
    ...(report.runs.some((run) => run.metrics) ? [["curves", "Curves"] as [string, string]] : []),
    ...(tables ? [["tables", `Tables ${tables}`] as [string, string]] : []),
    ["episodes", `Episodes ${number(rows.length)}`],
    ["made", "About"],
  ];
  const tab = tabs.some(([name]) => name === state.tab) ? state.tab : tabs[0][0];
  const kinds = report.runs.map((run) => run.warnings.length).reduce((sum, count) => sum + count, 0);
  const remarks = [...(report.notes.length ? [plural(report.notes.length, "note")] : []), ...(kinds ? [plural(kinds, "warning")] : [])].join(", ");
  const open = state.ep ? "episode" : state.group ? "group" : tab;
  return (
    <div class="page">
      <header class="top-of-page">
        <h1>{report.title}</h1>
        {report.live && <span class={problem ? "chip poor" : "chip good"} role="status">{problem ?? "live"}</span>}
        <nav aria-label="Parts of the report">
          {tabs.map(([name, label]) => <button key={name} type="button" aria-current={(open === tab ? tab : "episodes") === name ? "page" : undefined} onClick={() => change({ tab: name, ep: null, beside: null, group: null, other: null })}>{label}</button>)}
        </nav>
      </header>
      <main>
        {remarks && open === tab && (
          <details class="remarks">
            <summary>{remarks}</summary>
            <ul>
              {report.notes.map((note, index) => <li key={index}>{note}</li>)}
              {report.runs.flatMap((run) => run.warnings.map((warning, index) => <li key={`${run.id} ${index}`} class="warning">{report.runs.length > 1 && <b>{run.name}: </b>}{warning}</li>))}
            </ul>
          </details>
        )}
        {open === "episode" && <EpisodePage rows={rows} kept={found.rows} state={state} change={change} />}
        {open === "group" && <GroupPage rows={rows} state={state} change={change} />}
        {open === "curves" && <Curves report={report} state={state} change={change} />}
        {open === "tables" && <Tables report={report} state={state} change={change} />}
        {open === "episodes" && <Episodes report={report} rows={rows} kept={found.rows} link={found.link} state={state} change={change} last={last.current} />}
        {open === "made" && <Made report={report} />}
      </main>
    </div>
  );
}

function Made({ report }: { report: Report }) {
  return (
    <section class="made" aria-label="How it was made">
      {report.runs.map((run) => (
        <article key={run.id}>
          <h2>{run.name} <span class="muted">{run.kind}{run.seed !== null && `, seed ${run.seed}`}</span></h2>
          <dl>{Object.entries(run.made).map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{value}</dd></div>)}</dl>
          {run.recipe && <details class="context"><summary>Recipe</summary><pre class="piece">{run.recipe}</pre></details>}
        </article>
      ))}
    </section>
  );
}

const app = document.getElementById("app");
if (app) render(<App />, app);

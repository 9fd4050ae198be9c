import { useMemo } from "preact/hooks";
import type { Report } from "../schema";
import { useMedia, type Change, type State } from "../shared/hooks";
import { kindInWords, number, plural, signed } from "../shared/words";
import { List } from "./List";
import { byGroup, compare, FILTERS, mean, SORTS, sortGroups, type Group, type Row } from "./rows";

export const MARK = { right: "✓", wrong: "✕", unscored: "?" };

interface Props {
  report: Report;
  rows: Row[];
  /** The rows that the filters keep, sorted. */
  kept: Row[];
  link: string | null;
  state: State;
  change: Change;
  /** The episode or group that was open last. */
  last: string | null;
}

export function Episodes({ report, rows, kept, link, state, change, last }: Props) {
  const narrow = useMedia("(max-width: 760px)");
  const grouped = state.by === "group";
  const groups = useMemo(() => (grouped ? sortGroups(byGroup(kept), state) : []), [kept, grouped, state.sort, state.down]);
  const choices = useMemo(() => FILTERS.map(({ values }) => [...new Set(rows.flatMap(values))].sort(compare)), [rows]);
  const runs = report.runs.length > 1;
  const filtered = link !== null || state.q || FILTERS.some(({ key }) => state[key]);
  const clear = { q: null, link: null, ...Object.fromEntries(FILTERS.map(({ key }) => [key, null])) };
  const choice = JSON.stringify([state.sort, state.down, ...Object.keys(clear).map((key) => state[key])]);
  const size = narrow ? 106 : 60;
  return (
    <section aria-label="Episodes" class="episodes">
      <form class="filters" role="search" onSubmit={(event) => event.preventDefault()}>
        <label class="wide">Text <input type="search" value={state.q ?? ""} placeholder="question, answer, run, id" onInput={(event) => change({ q: event.currentTarget.value }, "same")} /></label>
        {FILTERS.map(({ key, label }, index) =>
          choices[index].length > 1 || state[key] ? (
            <label key={key}>{label}
              <select value={state[key] ?? ""} onChange={(event) => change({ [key]: event.currentTarget.value }, "same")}>
                <option value="">all</option>
                {choices[index].map((choice) => <option key={choice} value={choice}>{key === "kind" ? kindInWords(choice) : choice}</option>)}
              </select>
            </label>
          ) : null,
        )}
      </form>
      <div class="bar-of-list">
        <span aria-live="polite">
          {kept.length === rows.length ? plural(rows.length, "episode") : `${number(kept.length)} of ${plural(rows.length, "episode")}`}
          {grouped && `, ${plural(groups.length, "group")}`}
        </span>
        {link !== null && <span class="chip">{link}</span>}
        {filtered && <button type="button" onClick={() => change(clear)}>Clear filters</button>}
        <div class="segments" role="group" aria-label="One line for each">
          <button type="button" aria-pressed={!grouped} onClick={() => change({ by: null })}>Episodes</button>
          <button type="button" aria-pressed={grouped} onClick={() => change({ by: "group" })}>Groups</button>
        </div>
      </div>
      <div class="columns" role="group" aria-label="Sort by">
        {SORTS.map(({ key, label }) => {
          const on = state.sort === key;
          const next = !on ? { sort: key, down: null } : state.down ? { sort: null, down: null } : { sort: key, down: "1" };
          return <button key={key} type="button" class={`c-${key}`} aria-pressed={on} title={`Sort by ${label.toLowerCase()}`} onClick={() => change(next, "same")}>{label}{on && (state.down ? " ↓" : " ↑")}</button>;
        })}
      </div>
      {kept.length === 0 && <p class="empty">{rows.length ? "No episode passes the filters." : "There are no episodes yet."}</p>}
      {grouped ? (
        <List key={`groups${size}`} items={groups} keyOf={(group) => group.ref} height={size} label="Groups" first={last} choice={choice} onOpen={(group) => change({ group: group.ref })} render={(group) => <GroupLine group={group} runs={runs} />} />
      ) : (
        <List key={`episodes${size}`} items={kept} keyOf={(row) => row.ref} height={size} label="Episodes" first={last} choice={choice} onOpen={(row) => change({ ep: row.ref })} render={(row) => <Line row={row} runs={runs} />} />
      )}
    </section>
  );
}

function Line({ row, runs }: { row: Row; runs: boolean }) {
  return (
    <>
      <span class={`c-answer mark ${row.mark}`} title={row.mark}>{MARK[row.mark]}<span class="hidden">{row.mark}</span></span>
      <span class="c-question"><Question row={row} /><span class="muted ellipsis">{runs && `${row.run.name} · `}{row.answer ?? "no answer"}{row.truth !== null && row.mark !== "right" && ` (truth: ${row.truth})`}{row.errors > 0 && ` · ${plural(row.errors, "error")}`}</span></span>
      <span class="c-step"><i>step </i>{row.step ?? "–"}</span>
      <span class="c-k"><i>K </i>{row.frame_budget}</span>
      <span class="c-calls"><i>calls </i>{row.calls}</span>
      <span class="c-kind">{row.failures.length ? row.failures.map((kind) => <span key={kind} class="chip poor">{kindInWords(kind)}</span>) : <span class="chip good">strict</span>}</span>
      <span class="c-reward"><i>reward </i>{number(row.reward)}</span>
      <span class="c-advantage"><i>adv. </i>{signed(row.advantage)}</span>
    </>
  );
}

function GroupLine({ group: { rows }, runs }: { group: Group; runs: boolean }) {
  const first = rows[0];
  const strict = rows.filter((row) => !row.failures.length).length;
  return (
    <>
      <span class="c-answer muted">{rows.length}×</span>
      <span class="c-question"><Question row={first} /><span class="squares">{rows.map((row) => <span key={row.ref} class={`square ${row.mark}`} title={`${row.mark}, reward ${number(row.reward)}`}>{MARK[row.mark]}</span>)}{runs && <span class="muted ellipsis">{first.run.name}</span>}</span></span>
      <span class="c-step"><i>step </i>{first.step ?? "–"}</span>
      <span class="c-k"><i>K </i>{first.frame_budget}</span>
      <span class="c-calls"><i>calls </i>{number(mean(rows.map((row) => row.calls)))}</span>
      <span class="c-kind">{strict} of {rows.length} strict</span>
      <span class="c-reward"><i>reward </i>{number(mean(rows.map((row) => row.reward)))}</span>
      <span class="c-advantage"></span>
    </>
  );
}

const Question = ({ row }: { row: Row }) => <b class="ellipsis">{row.question}</b>;

// The rollouts of one prompt in one step side by side, and what another step did with the same prompt.
import { useEscape, type Change, type State } from "../shared/hooks";
import { Bars } from "../shared/Timeline";
import { endInWords, kindInWords, number, signed } from "../shared/words";
import { MARK } from "./Episodes";
import { byGroup, gather, mean, type Group, type Row } from "./rows";
import { useEpisode } from "./useEpisode";

interface Props {
  rows: Row[];
  state: State;
  change: Change;
}

const nameOf = ({ rows: [{ step, run, frame_budget, dispatch }] }: Group) => `${step === null ? "" : `step ${step}, `}${run.name}, K = ${frame_budget}, ${dispatch}`;

export function GroupPage({ rows, state, change }: Props) {
  const close = () => change({ group: null, other: null });
  useEscape(close);
  const group = byGroup(rows.filter((row) => state.group.startsWith(`${encodeURIComponent(row.run.id)}/`))).find(({ ref }) => ref === state.group);
  if (!group) return <p class="empty">This group is not in the report. <button type="button" onClick={close}>Back to the list</button></p>;
  const first = group.rows[0];
  const same = byGroup(rows.filter((row) => row.sample === first.sample));
  const other = same.find(({ ref }) => ref === state.other && ref !== group.ref);
  return (
    <section class="group" aria-label="Group">
      <nav class="crumbs">
        <button type="button" onClick={close}>← Back to the list</button>
        <label>Group <select value={group.ref} onChange={(event) => change({ group: event.currentTarget.value })}>{same.map((item) => <option key={item.ref} value={item.ref}>{nameOf(item)}</option>)}</select></label>
        {same.length > 1 && (
          <label>beside <select value={other?.ref ?? ""} onChange={(event) => change({ other: event.currentTarget.value })}>
            <option value="">nothing</option>
            {same.filter(({ ref }) => ref !== group.ref).map((item) => <option key={item.ref} value={item.ref}>{nameOf(item)}</option>)}
          </select></label>
        )}
      </nav>
      <h2 class="question">{first.question}</h2>
      {first.truth !== null && <p><span class="muted">Truth</span> <b>{first.truth}</b></p>}
      {other && <Differences first={group} beside={other} />}
      {[group, ...(other ? [other] : [])].map((item) => (
        <section key={item.ref} aria-label={nameOf(item)}>
          <h3>{nameOf(item)}</h3>
          <div class="cards">{item.rows.map((row) => <Card key={row.ref} row={row} most={largest(item)} change={change} />)}</div>
        </section>
      ))}
    </section>
  );
}

const largest = ({ rows }: Group) => Math.max(1e-9, ...rows.map((row) => Math.abs(row.advantage ?? 0)));

function Card({ row, most, change }: { row: Row; most: number; change: Change }) {
  const loaded = useEpisode(row);
  const share = Math.abs(row.advantage ?? 0) / most / 2;
  return (
    <button type="button" class="card" onClick={() => change({ ep: row.ref })}>
      <span class="top"><span class={`mark ${row.mark}`}>{MARK[row.mark]}</span> <b class="ellipsis">{row.answer ?? "no answer"}</b></span>
      <span class="balance" aria-hidden="true"><i class={(row.advantage ?? 0) < 0 ? "minus" : "plus"} style={{ left: `${(row.advantage ?? 0) < 0 ? 50 - share * 100 : 50}%`, width: `${share * 100}%` }} /></span>
      <span class="pair"><span class="muted">advantage</span> {signed(row.advantage)}</span>
      {Object.entries(row.rewards).map(([name, value]) => <span key={name} class="pair"><span class="muted">{name}</span> {value === null ? "unscored" : number(value)}</span>)}
      <span class="pair"><span class="muted">calls</span> {row.calls}</span>
      {typeof loaded === "object" && "episode" in loaded && <Bars crops={loaded.episode.crops} duration={loaded.episode.duration} />}
      <span class="chips">{row.failures.length ? row.failures.map((kind) => <span key={kind} class="chip poor">{kindInWords(kind)}</span>) : <span class="chip good">strict</span>}{row.end !== "answered" && <span class="chip">{endInWords(row.end)}</span>}</span>
    </button>
  );
}

const NUMBERS: [string, (rows: Row[]) => number | null][] = [
  ["mean reward", (rows) => mean(rows.map((row) => row.reward))],
  ["accuracy", (rows) => mean(rows.map((row) => row.rewards.accuracy ?? null))],
  ["strict", (rows) => mean(rows.map((row) => Number(row.failures.length === 0)))],
  ["calls", (rows) => mean(rows.map((row) => row.calls))],
  ["turns", (rows) => mean(rows.map((row) => row.turns))],
  ["unscored", (rows) => rows.filter((row) => row.mark === "unscored").length],
];

const counted = (values: string[]) => gather(values, (value) => value).sort((a, b) => b[1].length - a[1].length).map(([value, all]) => `${value} ×${all.length}`).join(", ") || "none";
const WORDS: [string, (rows: Row[]) => string][] = [
  ["answers", (rows) => counted(rows.map((row) => row.answer ?? "no answer"))],
  ["format failures", (rows) => counted(rows.flatMap((row) => row.failures.map(kindInWords)))],
];

/** From the earlier step to the later one, or else from the first group to the one beside it. */
function Differences({ first, beside }: { first: Group; beside: Group }) {
  const [a, b] = (first.rows[0].step ?? 0) > (beside.rows[0].step ?? 0) ? [beside, first] : [first, beside];
  return (
    <div class="scroll">
      <table>
        <caption>What changed</caption>
        <thead><tr><th></th><th scope="col">{nameOf(a)}</th><th scope="col">{nameOf(b)}</th><th scope="col">change</th></tr></thead>
        <tbody>
          {NUMBERS.map(([name, value]) => {
            const [left, right] = [value(a.rows), value(b.rows)];
            return <tr key={name}><th scope="row">{name}</th><td class="number">{number(left)}</td><td class="number">{number(right)}</td><td class="number">{left !== null && right !== null ? signed(right - left) : "–"}</td></tr>;
          })}
          {WORDS.map(([name, value]) => <tr key={name}><th scope="row">{name}</th><td>{value(a.rows)}</td><td>{value(b.rows)}</td><td></td></tr>)}
        </tbody>
      </table>
    </div>
  );
}

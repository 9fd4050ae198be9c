import { useEffect, useRef } from "preact/hooks";
import { EpisodeView } from "../shared/EpisodeView";
import { useEscape, type Change, type State } from "../shared/hooks";
import type { Heat } from "../shared/Text";
import { useVideo } from "../shared/Video";
import { number, signed } from "../shared/words";
import { gather, makeRef, type Row } from "./rows";
import { useEpisode } from "./useEpisode";

interface Props {
  rows: Row[];
  /** The list that the reader came from, to go on in it. */
  kept: Row[];
  state: State;
  change: Change;
}

const nameOf = (row: Row) =>
  [row.step === null ? null : `step ${row.step}`, row.dispatch, `K = ${row.frame_budget}`, `reward ${number(row.reward)}`, row.mark, row.id].filter(Boolean).join(", ");

export function EpisodePage({ rows, kept, state, change }: Props) {
  const close = () => change({ ep: null, beside: null });
  useEscape(close);
  const page = useRef<HTMLElement>(null);
  useEffect(() => {
    page.current?.focus({ preventScroll: true });
    scrollTo(0, 0);
  }, [state.ep]);
  const row = rows.find(({ ref }) => ref === state.ep);
  if (!row) return <p class="empty">This episode is not in the report. <button type="button" onClick={close}>Back</button></p>;
  const place = kept.findIndex(({ ref }) => ref === row.ref);
  const near = (other: Row) => Number(other.run === row.run) + Number(other.run === row.run && other.group === row.group);
  const same = rows.filter((other) => other.sample === row.sample && other.ref !== row.ref).sort((a, b) => near(b) - near(a));
  const beside = same.find(({ ref }) => ref === state.beside);
  const group = makeRef(row.run.id, row.group);
  const step = (by: number) => kept[place + by] && change({ ep: kept[place + by].ref, beside: null }, "same");
  return (
    <section class="episode-page" aria-label="Episode" ref={page} tabIndex={-1}>
      <nav class="crumbs">
        <button type="button" onClick={close}>← Back</button>
        {place >= 0 && (
          <span class="segments" role="group" aria-label="In the list">
            <button type="button" disabled={place === 0} onClick={() => step(-1)} aria-label="Previous episode">↑</button>
            <button type="button" disabled={place === kept.length - 1} onClick={() => step(1)} aria-label="Next episode">↓</button>
          </span>
        )}
        {place >= 0 && <span class="muted">{number(place + 1)} of {number(kept.length)}</span>}
        <button type="button" onClick={() => change({ ep: null, beside: null, group, tab: "episodes" })}>Its group</button>
        {same.length > 0 && (
          <label>beside <select value={beside?.ref ?? ""} onChange={(event) => change({ beside: event.currentTarget.value })}>
            <option value="">nothing</option>
            {gather(same, (other) => (other.group === row.group && other.run === row.run ? "same group" : other.run.name)).map(([title, others]) => (
              <optgroup key={title} label={title}>{others.map((other) => <option key={other.ref} value={other.ref}>{nameOf(other)}</option>)}</optgroup>
            ))}
          </select></label>
        )}
      </nav>
      <div class={beside ? "sides two" : "sides"}>
        {[row, ...(beside ? [beside] : [])].map((item) => <Side key={item.ref} row={item} state={state} change={change} />)}
      </div>
    </section>
  );
}

function Side({ row, state, change }: { row: Row; state: State; change: Change }) {
  const loaded = useEpisode(row);
  const episode = typeof loaded === "object" && "episode" in loaded ? loaded.episode : null;
  const { player, at, seek } = useVideo(episode?.video_url ?? null);
  const facts = [row.run.name, row.id, row.step === null ? null : `step ${row.step}`, row.advantage === null ? null : `advantage ${signed(row.advantage)}`];
  return (
    <div class="side">
      <p class="facts muted">{facts.filter(Boolean).map((fact, index) => <span key={index}>{fact}</span>)}</p>
      {loaded === "loading" && <p class="empty">Loading…</p>}
      {typeof loaded === "object" && "problem" in loaded && <><h2 class="question">{row.question}</h2><p class="empty">{loaded.problem}</p></>}
      {episode && (
        <EpisodeView episode={episode} heat={(state.heat as Heat | undefined) ?? "off"} onHeat={(heat) => change({ heat: heat === "off" ? null : heat }, "same")} at={at} seek={seek}>
          {player}
        </EpisodeView>
      )}
    </div>
  );
}

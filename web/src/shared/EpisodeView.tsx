// One episode: what was asked, what the video looked like, who watched what, what was written and what it was worth.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { CropView, Episode } from "../schema";
import { useEscape } from "./hooks";
import { HeatSwitch, Pieces, scale, Timed, type Heat } from "./Text";
import { cropName, Frame, Timeline, windowOf } from "./Timeline";
import { clock, endInWords, kindInWords, lasted, number, plural, statusInWords } from "./words";
import type { Seek } from "./Video";

/** Options that bring their letters along. */
const LETTERED = /^\(?[A-Z][.):]/;

interface Props {
  episode: Episode;
  heat: Heat;
  onHeat: (heat: Heat) => void;
  at: number | null;
  seek: Seek;
  /** Stands under the question. */
  children?: ComponentChildren;
}

export function EpisodeView({ episode, heat, onHeat, at, seek, children }: Props) {
  const [place, setPlace] = useState<string | null>(null);
  const chosen = episode.crops.find((crop) => cropName(crop) === place) ?? null;
  const most = scale([...episode.turns, ...episode.crops].flatMap((part) => part.pieces), heat);
  const kept = [...episode.turns, ...episode.crops].some((part) => part.pieces.some((piece) => piece.spelled));
  const rewards = Object.entries(episode.rewards);
  const closer = <Crop key={place} crop={chosen} heat={heat} most={most} seek={seek} onClose={() => setPlace(null)} />;
  const turns = (
    <>
      {closer}
      <section aria-label="Turns" class="turns">
        {episode.turns.map((turn) => (
          <article key={turn.index} class="turn">
            <h3>
              Turn {turn.index + 1} {!turn.pieces.length ? null : turn.strict ? <span class="chip good">strict</span> : <span class="chip poor">{kindInWords(turn.failure ?? "not strict")}</span>}
            </h3>
            {turn.pieces.length ? (
              <Pieces pieces={turn.pieces} heat={heat} most={most} seek={seek} />
            ) : (
              <Pieces pieces={[{ text: turn.text, kind: "sampled", images: 0, tokens: 0, spelled: null, logprobs: null, advantages: null }]} heat="off" most={1} seek={seek} />
            )}
          </article>
        ))}
      </section>
    </>
  );
  return (
    <div class="episode">
      <header>
        <h2 class="question">{episode.question}</h2>
        {episode.options.length > 0 && <ol class={episode.options.every((option) => LETTERED.test(option)) ? "options lettered" : "options"} type="A">{episode.options.map((option, index) => <li key={index}>{option}</li>)}</ol>}
        <p class="verdict">
          <Answer episode={episode} seek={seek} />
        </p>
        <p class="facts muted">
          {[
            episode.video, clock(episode.duration, true), `K = ${episode.frame_budget}`, episode.dispatch, plural(episode.turns.length, "turn"), plural(episode.crops.length, "call"),
            endInWords(episode.end), episode.prompt_tokens ? `${plural(episode.prompt_tokens, "prompt token")}, ${number(episode.sampled_tokens)} sampled` : "",
            ...Object.entries(episode.timings).map(([name, seconds]) => `${name.replaceAll("_", " ")} ${lasted(seconds)}`),
          ].filter(Boolean).map((fact, index) => <span key={index}>{fact}</span>)}
        </p>
        {children}
      </header>
      {episode.errors.length > 0 && (
        <ul class="errors" aria-label="Errors">
          {episode.errors.map((error, index) => (
            <li key={index}><b>{error.kind.replaceAll("_", " ")}</b> in {error.where}: {error.message} <span class="muted">{error.scored ? "The episode is scored all the same." : "The episode is unscored: failed is not wrong."}</span></li>
          ))}
        </ul>
      )}
      <Timeline episode={episode} chosen={chosen} onChoose={(crop) => setPlace(crop && cropName(crop))} at={at} seek={seek} />
      <Reports crops={episode.crops} seek={seek} />
      {kept ? <HeatSwitch heat={heat} most={most} onHeat={onHeat}>{turns}</HeatSwitch> : turns}
      {rewards.length > 0 && (
        <table class="rewards">
          <caption>Rewards</caption>
          <tbody>
            {rewards.map(([name, { value, explanation }]) => (
              <tr key={name}><th scope="row">{name}</th><td class="number">{value === null ? "unscored" : number(value)}</td><td>{explanation}</td></tr>
            ))}
          </tbody>
        </table>
      )}
    </div>
  );
}

function Answer({ episode, seek }: { episode: Episode; seek: Seek }) {
  const accuracy = episode.rewards.accuracy;
  const mark = !accuracy ? null : accuracy.value === null ? ["", "unscored"] : accuracy.value >= 0.5 ? ["good", "right"] : ["poor", "wrong"];
  return (
    <>
      {mark && <span class={`chip ${mark[0]}`}>{mark[1]}</span>}{" "}
      {episode.answer === null ? <span class="muted">{episode.end ? "No answer." : ""}</span> : <span class="answer"><span class="muted">Answer</span> <b><Timed text={episode.answer} seek={seek} /></b></span>}
      {episode.forced && <span class="chip">forced</span>}{" "}
      {episode.truth !== null && <span><span class="muted">Truth</span> <b><Timed text={episode.truth} seek={seek} /></b></span>}
    </>
  );
}

/** What the sub-agents said, next to each other as the main agent reads it. */
function Reports({ crops, seek }: { crops: CropView[]; seek: Seek }) {
  const said = crops.filter((crop) => crop.report !== null || crop.error !== null);
  if (!said.length) return null;
  return (
    <section aria-label="Reports">
      <h3>Reports</h3>
      <ul class="reports">
        {said.map((crop) => (
          <li key={cropName(crop)}>
            {crop.start === null ? <span class="muted">{windowOf(crop)}</span> : <button type="button" class="time" title={`Go to ${number(crop.start)} s`} onClick={() => seek(crop.start ?? 0)}>{windowOf(crop)}</button>}
            <span>{crop.report !== null ? <Timed text={crop.report} seek={seek} /> : <><span class="chip poor">{statusInWords(crop.status).word}</span> {crop.error}</>}</span>
          </li>
        ))}
      </ul>
    </section>
  );
}

function Crop({ crop, heat, most, seek, onClose }: { crop: CropView | null; heat: Heat; most: number; seek: Seek; onClose: () => void }) {
  useEscape(crop ? onClose : null);
  if (!crop) return null;
  return (
    <section class="crop" aria-label={`Call ${cropName(crop)}`}>
      <header>
        <h3>Call {cropName(crop)} <span class={`bar ${crop.status}`} /> {statusInWords(crop.status).glyph} {statusInWords(crop.status).word}</h3>
        <span class="facts muted"><span>{windowOf(crop)}</span><span>{plural(crop.frames.length, "frame")}</span><span>{plural(crop.sampled_tokens, "token")}</span><span>{number(crop.seconds)} s</span></span>
        <button type="button" class="close" onClick={onClose} aria-label="Close this call">✕</button>
      </header>
      {crop.error && <p class="errors">{crop.error}</p>}
      <div class="frames">
        {crop.frames.map((frame, index) => (
          <button key={index} type="button" onClick={() => seek(frame.time)}><Frame frame={frame} size="large" /><span>{clock(frame.time, true)}</span></button>
        ))}
      </div>
      {crop.missing.length > 0 && <ul class="errors" aria-label="Missing frames">{crop.missing.map((why, index) => <li key={index}>{why}</li>)}</ul>}
      {crop.report !== null && <blockquote><Timed text={crop.report} seek={seek} /></blockquote>}
      <details class="context"><summary>The call as it was written</summary><pre class="piece">{crop.call}</pre></details>
      {crop.pieces.length > 0 && (
        <details class="context" open={heat !== "off"}>
          <summary>What the sub-agent was given and wrote</summary>
          <Pieces pieces={crop.pieces} heat={heat} most={most} seek={seek} />
        </details>
      )}
    </section>
  );
}

// What the model saw and wrote: tags highlighted, times that can be clicked, tokens coloured by a number.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { PieceView } from "../schema";
import { number, plural, signed } from "./words";
import type { Seek } from "./Video";

export type Heat = "off" | "logprob" | "advantage";

const TAG = /<\/?(?:think|tool_call|tool_response|answer)>|<\|im_(?:start|end)\|>/g;
/** "12.5 seconds", "12 s", "3-8 s", "from 3 to 8 seconds", "1:02:03". */
const TIME = /\b(\d+(?:\.\d+)?)(?:\s*(?:-|–|to|and)\s*(\d+(?:\.\d+)?))?\s?(?:s|sec|secs|seconds?)\b|\b(?:(\d+):)?(\d{1,2}):(\d{2}(?:\.\d+)?)\b/g;

function split(text: string, pattern: RegExp, plain: (text: string) => ComponentChildren, match: (found: RegExpMatchArray) => ComponentChildren) {
  const out: ComponentChildren[] = [];
  let at = 0;
  for (const found of text.matchAll(pattern)) {
    out.push(plain(text.slice(at, found.index)), match(found));
    at = found.index + found[0].length;
  }
  out.push(plain(text.slice(at)));
  return out;
}

/** Text whose times (seconds of the video) are buttons that seek. */
export function Timed({ text, seek }: { text: string; seek: Seek }) {
  return (
    <>
      {split(text, TIME, (plain) => plain, (found) => {
        const time = found[1] !== undefined ? Number(found[1]) : Number(found[3] ?? 0) * 3600 + Number(found[4]) * 60 + Number(found[5]);
        return <button type="button" class="time" title={`Go to ${number(time)} s`} onClick={() => seek(time)}>{found[0]}</button>;
      })}
    </>
  );
}

function Tagged({ text, seek }: { text: string; seek: Seek | null }) {
  const plain = (part: string) => (seek ? <Timed text={part} seek={seek} /> : part);
  return <>{split(text, TAG, plain, (found) => <b class="tag">{found[0]}</b>)}</>;
}

/** For each token whether a structural tag is in it, by characters: a tag may be several tokens. */
function inTags(spelled: string[]): boolean[] {
  const spans = [...spelled.join("").matchAll(TAG)].map((found) => [found.index, found.index + found[0].length] as const);
  let at = 0;
  return spelled.map((token) => {
    const start = at;
    at += token.length;
    return spans.some(([from, to]) => start < to && from < at);
  });
}

/** What the strongest colour stands for: five nats, and the largest advantage of the episode. */
export function scale(pieces: PieceView[], heat: Heat): number {
  const advantages = pieces.flatMap((piece) => piece.advantages ?? []);
  return heat === "logprob" ? 5 : advantages.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
}

function Tokens({ piece, heat, most }: { piece: PieceView; heat: Heat; most: number }) {
  const values = heat === "logprob" ? piece.logprobs : piece.advantages;
  const spelled = piece.spelled ?? [];
  const tags = inTags(spelled);
  return (
    <>
      {spelled.map((token, index) => {
        const value = values?.[index] ?? null;
        const strength = value === null ? 0 : Math.min(1, Math.abs(value) / most);
        const kind = heat === "logprob" ? "low" : (value ?? 0) < 0 ? "minus" : "plus";
        const said = `${JSON.stringify(token)}  log-probability ${number(piece.logprobs?.[index])}, advantage ${signed(piece.advantages?.[index] ?? null)}`;
        const style = { "--heat": `${Math.round(strength * 100)}%` };
        return <span key={index} class={`token ${kind}${tags[index] ? " tag" : ""}`} style={style} title={said}>{token}</span>;
      })}
    </>
  );
}

/** The pieces of a turn or of a sub-agent's trace, in order. Context is folded. */
export function Pieces({ pieces, heat, most, seek }: { pieces: PieceView[]; heat: Heat; most: number; seek: Seek }) {
  return (
    <>
      {pieces.map((piece, index) => {
        if (!piece.text && !piece.images) return null;
        const size = [plural(piece.tokens, "token"), ...(piece.images ? [plural(piece.images, "image")] : [])].join(", ");
        if (piece.kind === "context") {
          return (
            <details key={index} class="context">
              <summary>What it was given <span class="muted">{size}</span></summary>
              <pre class="piece"><Tagged text={piece.text} seek={null} /></pre>
            </details>
          );
        }
        const coloured = heat !== "off" && piece.spelled !== null && (heat === "logprob" ? piece.logprobs : piece.advantages);
        const title = piece.kind === "forced" ? "Forced: the model did not write this, and nothing is learned from it" : undefined;
        return (
          <pre key={index} class={`piece ${piece.kind}`} title={title}>
            {coloured ? <Tokens piece={piece} heat={heat} most={most} /> : <Tagged text={piece.text} seek={seek} />}
            {heat !== "off" && !coloured && piece.kind === "sampled" && <i class="muted"> (no {heat} was kept of these tokens)</i>}
          </pre>
        );
      })}
    </>
  );
}

/** The switch of the heat and what its colours mean. `most` is what the strongest colour stands for. */
export function HeatSwitch({ heat, most, onHeat, children }: { heat: Heat; most: number; onHeat: (heat: Heat) => void; children?: ComponentChildren }) {
  const [said, setSaid] = useState("");
  const tell = (event: Event) => {
    const title = event.target instanceof HTMLElement && event.target.classList.contains("token") ? event.target.title : "";
    if (title) setSaid(title);
  };
  return (
    <div onMouseOver={tell} onClick={tell}>
      <div class="heatbar">
        <span id="heat-label">Heat of tokens</span>
        <div class="segments" role="group" aria-labelledby="heat-label">
          {(["off", "logprob", "advantage"] as const).map((kind) => (
            <button key={kind} type="button" aria-pressed={heat === kind} onClick={() => onHeat(kind)}>{kind}</button>
          ))}
        </div>
        {heat === "logprob" && <span class="legend">0 <span class="ramp low" /> −{number(most)} and less likely</span>}
        {heat === "advantage" && <span class="legend">−{number(most)} <span class="ramp both" /> +{number(most)}</span>}
        {heat !== "off" && <span class="said muted">{said || "point at a token to read its numbers"}</span>}
      </div>
      {children}
    </div>
  );
}

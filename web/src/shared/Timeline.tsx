// The whole video from left to right: overview frames at their true times, and a lane for each call.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { CropView, Episode, Thumbnail } from "../schema";
import { roving } from "./hooks";
import { clock, number, picture, plural, statusInWords } from "./words";
import type { Seek } from "./Video";

export const cropName = (crop: CropView) => `${crop.turn + 1}.${crop.index + 1}`;
export const windowOf = ({ start, end }: CropView) =>
  start === null || end === null ? "no window" : `${clock(start, true)}–${clock(end, true)}`;

export function Frame({ frame, size = "small" }: { frame: Thumbnail; size?: "small" | "large" }) {
  const source = picture(frame.picture);
  return source ? (
    <img class={`frame ${size}`} src={source} alt={`Frame at ${clock(frame.time, true)}`} loading="lazy" />
  ) : (
    <span class={`frame missing ${size}`}>{frame.why ?? "no picture was kept"}</span>
  );
}

/** Times (seconds) of the axis: round ones, about eight. */
function ticks(duration: number): number[] {
  const steps = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200];
  const step = steps.find((candidate) => duration / candidate <= 8) ?? duration / 8;
  return Array.from({ length: Math.floor(duration / step) + 1 }, (_, index) => index * step);
}

/** Where something that is a share of the width wide may stand without leaving the timeline, as a style. */
const within = (share: number) => ({ left: `${share * 100}%`, transform: `translateX(${-share * 100}%)` });

export function Bars({ crops, duration }: { crops: CropView[]; duration: number }) {
  return (
    <div class="minilanes" aria-hidden="true">
      {crops.map((crop) => <span key={cropName(crop)} class="minilane"><Bar crop={crop} duration={duration} /></span>)}
    </div>
  );
}

function Bar({ crop, duration }: { crop: CropView; duration: number }) {
  const whole = { left: "0", width: "100%" };
  const place = crop.start === null || crop.end === null ? whole : { left: `${(crop.start / duration) * 100}%`, width: `${((crop.end - crop.start) / duration) * 100}%` };
  return <span class={`bar ${crop.status}${crop.start === null ? " nowhere" : ""}`} style={place} />;
}

interface Props {
  episode: Episode;
  /** The crop that is shown below, and how to choose another. */
  chosen: CropView | null;
  onChoose: (crop: CropView | null) => void;
  at: number | null;
  seek: Seek;
}

export function Timeline({ episode, chosen, onChoose, at, seek }: Props) {
  const [tip, setTip] = useState<{ share: number; content: ComponentChildren } | null>(null);
  const duration = Math.max(episode.duration, 1e-3);
  const share = (time: number) => Math.min(1, Math.max(0, time / duration));
  const width = `max(5px, ${Math.min(8, 100 / Math.max(1, episode.overview.length))}%)`;
  const turns = [...new Set(episode.crops.map((crop) => crop.turn))].sort((a, b) => a - b);
  const hints = (where: number, content: ComponentChildren) => ({
    onMouseEnter: () => setTip({ share: where, content }),
    onFocus: () => setTip({ share: where, content }),
    onMouseLeave: () => setTip(null),
    onBlur: () => setTip(null),
  });
  return (
    <div class="timeline">
      <div class="track strip" role="group" aria-label="Overview frames" onKeyDown={roving}>
        {episode.overview.map((frame, index) => (
          <button
            key={index}
            type="button"
            class="thumb"
            tabIndex={index ? -1 : 0}
            style={{ "--width": width, "--at": `${share(frame.time) * 100}%` }}
            aria-label={`Overview frame at ${clock(frame.time, true)}`}
            onClick={() => seek(frame.time)}
            {...hints(share(frame.time), <><Frame frame={frame} size="large" /><div>{clock(frame.time, true)} <span class="muted">({number(frame.time)} s)</span></div></>)}
          >
            <Frame frame={frame} />
          </button>
        ))}
        {!episode.overview.length && <span class="muted">no overview frames</span>}
      </div>
      <div class="track axis" aria-hidden="true" onClick={(event) => {
        const box = event.currentTarget.getBoundingClientRect();
        seek(((event.clientX - box.left) / box.width) * duration);
      }}>
        {episode.overview.map((frame, index) => <i key={index} class="tick" style={{ left: `${share(frame.time) * 100}%` }} />)}
        {ticks(duration).map((time) => <span key={time} class="label" style={within(share(time))}>{clock(time, duration < 10)}</span>)}
      </div>
      {turns.map((turn) => (
        <div key={turn} class="lanes" role="group" aria-label={`Calls of turn ${turn + 1}`} onKeyDown={roving}>
          <span class="gutter" title={`Turn ${turn + 1}`}>T{turn + 1}</span>
          {episode.crops.filter((crop) => crop.turn === turn).map((crop, index) => {
            const { glyph, word } = statusInWords(crop.status);
            const [start, end] = [share(crop.start ?? 0), share(crop.end ?? 0)];
            const inside = Math.max(start, 1 - end) < 0.35; // no room beside it
            const beside = inside || start > 1 - end ? { right: `${(1 - (inside ? end : start)) * 100}%` } : { left: `${end * 100}%` };
            return (
              <button
                key={crop.index}
                type="button"
                class="lane"
                tabIndex={index ? -1 : 0}
                aria-pressed={chosen === crop}
                aria-label={`Call ${cropName(crop)}, ${word}, ${windowOf(crop)}${crop.report ? `: ${crop.report}` : ""}`}
                onClick={() => {
                  setTip(null); // what it says is shown below
                  onChoose(chosen === crop ? null : crop);
                  if (crop.start !== null) seek(crop.start);
                }}
                {...hints((start + end) / 2, <CropHint crop={crop} />)}
              >
                <Bar crop={crop} duration={duration} />
                {crop.frames.map((frame, number) => <i key={number} class="tick" style={{ left: `${share(frame.time) * 100}%` }} />)}
                <span class={inside ? "name inside" : "name"} style={beside}><b>{glyph} {word}</b> <span class="window">{windowOf(crop)}</span></span>
              </button>
            );
          })}
        </div>
      ))}
      {at !== null && <div class="track over"><i class="needle" style={{ left: `${share(at) * 100}%` }}><span style={{ transform: `translateX(${-share(at) * 100}%)` }}>{clock(at, true)}</span></i></div>}
      {tip && <div class="track over"><div class="tip" style={within(tip.share)}>{tip.content}</div></div>}
    </div>
  );
}

function CropHint({ crop }: { crop: CropView }) {
  const said = crop.report ?? crop.error ?? (crop.status === "running" ? "The sub-agent is watching." : "");
  return (
    <>
      <div><b>{cropName(crop)} {statusInWords(crop.status).word}</b> {windowOf(crop)}, {plural(crop.frames.length, "frame")}, {number(crop.seconds)} s</div>
      <div class="hintframes">{crop.frames.slice(0, 4).map((frame, index) => <Frame key={index} frame={frame} />)}</div>
      <div>{said.slice(0, 240)}</div>
    </>
  );
}

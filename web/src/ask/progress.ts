// What is known of a question that is being answered: an episode that grows with each event. A pure function.
import type { AskEvent, CropView, Episode } from "../schema";

export interface Progress {
  state: "queued" | "running" | "done" | "failed" | "cancelled";
  position: number | null;
  episode: Episode;
  /** Why it failed. */
  message: string | null;
}

export const begin = (question: string): Progress => ({
  state: "queued",
  position: null,
  message: null,
  episode: {
    id: "", question, options: [], truth: null, video: "", video_url: null, duration: 0, frame_budget: 0, dispatch: "", answer: null, forced: false, end: "",
    overview: [], turns: [], crops: [], rewards: {}, errors: [], timings: {}, prompt_tokens: 0, sampled_tokens: 0,
  },
});

const withCrop = (crops: CropView[], crop: CropView) =>
  [...crops.filter((held) => held.turn !== crop.turn || held.index !== crop.index), crop].sort((a, b) => a.turn - b.turn || a.index - b.index);

/** Events may come twice (a stream that was taken up again starts over): the outcome is the same. */
export function advance(progress: Progress, event: AskEvent): Progress {
  const { episode } = progress;
  const grown = (change: Partial<Episode>): Progress => ({ ...progress, state: "running", episode: { ...episode, ...change } });
  switch (event.event) {
    case "queued":
      return { ...progress, state: "queued", position: event.position };
    case "started":
      return grown({});
    case "overview":
      return grown({ duration: event.duration, overview: event.frames, frame_budget: event.frames.length });
    case "turn": {
      const turn = { index: event.index, strict: true, failure: null, text: event.text, pieces: [] };
      return grown({ turns: [...episode.turns.filter(({ index }) => index !== event.index), turn], answer: event.answer ?? episode.answer });
    }
    case "crop_started": {
      const { turn, index, start, end } = event;
      if (episode.crops.some((crop) => crop.turn === turn && crop.index === index && crop.status !== "running")) return progress;
      return grown({ crops: withCrop(episode.crops, { turn, index, start, end, status: "running", call: "", report: null, error: null, missing: [], frames: [], pieces: [], seconds: 0, sampled_tokens: 0 }) });
    }
    case "crop_done":
      return grown({ crops: withCrop(episode.crops, event.crop) });
    case "done":
      return { ...progress, state: "done", episode: event.episode };
    case "failed":
      return { ...progress, state: "failed", message: event.message };
    case "cancelled":
      return { ...progress, state: "cancelled" };
  }
}

/** In words, for the status line. */
export function inWords({ state, position, episode, message }: Progress): string {
  const reported = episode.crops.filter(({ status }) => status !== "running").length;
  if (state === "queued") return position ? `In the queue, position ${position}.` : "In the queue.";
  if (state === "failed") return `It failed: ${message}`;
  if (state === "cancelled") return "Cancelled.";
  if (state === "done") return episode.answer === null ? "Done, without an answer." : `Answer: ${episode.answer}`;
  if (!episode.overview.length) return "Reading the video…";
  if (!episode.crops.length) return "Looking at the overview…";
  return reported < episode.crops.length ? `Watching: ${reported} of ${episode.crops.length} windows have reported.` : "Weighing the reports…";
}

// The contract between Python and the pages. Times are seconds of the video; all text is data and is shown as text.
// `paravt/report/payload.py` writes what is here for reports, `paravt/serve/api.py` for the ask page.

/** A page's data. Static files hold it in the page; `paravt view` serves it at `data/report.json`. */
export interface Report {
  format: 1;
  title: string;
  /** What was sampled or left out to keep the file small, and what could not be read, a sentence each. */
  notes: string[];
  runs: Run[];
  /** True while `paravt view` follows a run: the page asks again every few seconds. */
  live: boolean;
}

export interface Run {
  id: string;
  name: string;
  /** Runs that differ in nothing but the seed share it: they are one line with a band. */
  group: string;
  kind: "rl" | "sft" | "evaluation" | "episodes";
  seed: number | null;
  /** How it was made: versions, git revision, command. */
  made: Record<string, string>;
  /** The recipe as JSON text. */
  recipe: string | null;
  warnings: string[];
  /** Columns of equal length; null where a step has no value. */
  metrics: { step: number[]; values: Record<string, (number | null)[]> } | null;
  tables: Table[];
  episodes: EpisodeRow[];
}

export type Cell = string | number | null;

export interface Table {
  title: string;
  columns: string[];
  /** A cell is a text, a number, or null; `link` of a row names episodes by their ids. */
  rows: { cells: Cell[]; link?: string[] }[];
}

/** One line of the list: enough to filter, sort and group without the episode itself. */
export interface EpisodeRow {
  /** Unique in its run. */
  id: string;
  /** The chunk that holds the episode, "" if it was left out of a static file. */
  chunk: string;
  step: number | null;
  /** The rollouts of one prompt in one step share it. */
  group: string;
  /** The question, over steps and runs. */
  sample: string;
  question: string;
  frame_budget: number;
  dispatch: string;
  calls: number;
  turns: number;
  answer: string | null;
  truth: string | null;
  /** Named rewards or scores; null is unscored. `total` is what was paid; evaluations have `accuracy` only. */
  rewards: Record<string, number | null>;
  /** The group's advantage of this episode; null where nothing was trained. */
  advantage: number | null;
  /** Format failures, one for each kind (see FORMAT_KINDS in paravt/structure.py); empty is strict. */
  failures: string[];
  end: string;
  errors: number;
  seconds: number;
}

/** A chunk: episodes by id. In a static page it is `<script type="application/json+deflate" id="chunk-NAME">`, base64
 * of zlib (DecompressionStream "deflate"); `paravt view` serves it as JSON at `data/chunks/NAME.json`. */
export type Chunk = Record<string, Episode>;

export interface Episode {
  id: string;
  question: string;
  options: string[];
  truth: string | null;
  video: string;
  /** Where the player finds the video: only in `paravt view` and on the ask page, null otherwise. */
  video_url: string | null;
  duration: number;
  frame_budget: number;
  dispatch: string;
  answer: string | null;
  forced: boolean;
  end: string;
  overview: Thumbnail[];
  turns: TurnView[];
  crops: CropView[];
  rewards: Record<string, { value: number | null; explanation: string }>;
  errors: { kind: string; where: string; message: string; scored: boolean }[];
  timings: Record<string, number>;
  prompt_tokens: number;
  sampled_tokens: number;
}

/** Data URIs by key: what many episodes of a static page show, in it once, as chunks are: the element `pictures-NAME`. */
export type Pictures = Record<string, string>;

/** `picture` is a data URI (image/webp or jpeg), `#NAME/KEY` (entry KEY of the pictures NAME; static pages only), or null
 * where the frame could not be had (`why` says so). */
export interface Thumbnail {
  time: number;
  picture: string | null;
  why?: string;
}

/** A trace is what the model saw and wrote, in order. */
export interface PieceView {
  text: string;
  /** sampled: the model wrote it; forced: we wrote it into its turn; context: prompts, replies (dimmed). */
  kind: "sampled" | "forced" | "context";
  /** Number of images behind placeholders of this piece, whose text leaves the placeholders out. */
  images: number;
  tokens: number;
  /** Of each token, where the run kept them: spelled text, log-probability, advantage (credit, anchor included). */
  spelled: string[] | null;
  logprobs: number[] | null;
  advantages: number[] | null;
}

export interface TurnView {
  index: number;
  strict: boolean;
  /** The failure's kind in words, null if strict. */
  failure: string | null;
  /** The assistant's turn as text, forced prefix included; structural tags in it are highlighted by the page. */
  text: string;
  /** What stood before the turn in the main trace (prompt or replies), then the turn's own pieces. */
  pieces: PieceView[];
}

export interface CropView {
  turn: number;
  index: number;
  status: "ran" | "repaired" | "bad" | "failed" | "timed_out" | "skipped" | "running";
  start: number | null;
  end: number | null;
  /** The call as the model wrote it. */
  call: string;
  report: string | null;
  error: string | null;
  missing: string[];
  frames: Thumbnail[];
  pieces: PieceView[];
  seconds: number;
  sampled_tokens: number;
}

// The ask page. `POST /v1/ask` answers 202 {id}; `GET /v1/ask/{id}/events` is a stream of server-sent events whose
// name is `event` and whose data is the rest; `GET /v1/ask/{id}` is the state at any time; DELETE cancels. A stream
// begins with all that has happened before: who comes late or comes back misses nothing, and may hear things twice.
export type AskEvent =
  | { event: "queued"; position: number }
  | { event: "started" }
  | { event: "overview"; duration: number; frames: Thumbnail[] }
  | { event: "turn"; index: number; text: string; calls: number; answer: string | null }
  | { event: "crop_started"; turn: number; index: number; start: number; end: number }
  | { event: "crop_done"; crop: CropView }
  | { event: "done"; episode: Episode }
  | { event: "failed"; message: string }
  | { event: "cancelled" };

export interface AskRequest {
  /** The id of an uploaded video (`POST /v1/videos`) or one of `GET /v1/videos`. */
  video: string;
  question: string;
  options: string[];
  frame_budget: number;
  dispatch: "parallel" | "sequential" | "none";
}

/** `GET /v1/ask/{id}`. */
export interface AskState {
  id: string;
  state: "queued" | "running" | "done" | "failed" | "cancelled";
  /** In the queue, from 1; null if it isn't queued. */
  position: number | null;
  events: AskEvent[];
}

/** A line of `GET /v1/asks`, the newest first. */
export interface AskItem {
  id: string;
  /** The id of the video, as in AskRequest. */
  video: string;
  question: string;
  answer: string | null;
  state: AskState["state"];
}

export interface VideoInfo {
  id: string;
  name: string;
  duration: number;
  width: number;
  height: number;
  /** For the player; supports ranges. */
  url: string;
}

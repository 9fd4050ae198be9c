// Codes and numbers in words.
import type { CropView } from "../schema";

export const STATUS: Record<CropView["status"], { glyph: string; word: string }> = {
  ran: { glyph: "✓", word: "ran" },
  repaired: { glyph: "✎", word: "repaired" },
  bad: { glyph: "✕", word: "bad call" },
  failed: { glyph: "!", word: "failed" },
  timed_out: { glyph: "◷", word: "timed out" },
  skipped: { glyph: "–", word: "skipped" },
  running: { glyph: "…", word: "running" },
};

/** Of a status that a file has and nobody knows, itself. */
export const statusInWords = (status: string) => (Object.hasOwn(STATUS, status) ? STATUS[status as CropView["status"]] : { glyph: "?", word: status });

const KINDS: Record<string, string> = {
  think_unclosed: "think never closed",
  think_missing: "no think",
  call_malformed: "malformed call",
  call_python: "call in Python style",
  call_repaired: "call was repaired",
  prose_between: "prose between parts",
  junk_after: "junk after the end",
  answer_empty: "empty answer",
  answer_unclosed: "answer never closed",
  structure_missing: "neither call nor answer",
  length: "ran into the limit",
  forced: "answer was forced",
};

const ENDS: Record<string, string> = {
  answered: "answered",
  no_call: "ended without call or answer",
  max_turns: "ran out of turns",
  budget: "ran out of tokens",
  failed: "failed",
};

export const kindInWords = (kind: string) => Object.hasOwn(KINDS, kind) ? KINDS[kind] : kind.replaceAll("_", " ");
export const endInWords = (end: string) => Object.hasOwn(ENDS, end) ? ENDS[end] : end.replaceAll("_", " ");

/** Three significant digits; integers as they are, very small ones with an exponent. */
export function number(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (Math.abs(value) < 1e-4) return Number(value.toPrecision(3)).toExponential();
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}

/** How long something took. */
export const lasted = (seconds: number) => (seconds < 1e-3 ? "under 1 ms" : `${number(seconds)} s`);

export const signed = (value: number | null) => (value !== null && value > 0 ? "+" : "") + number(value).replace("-", "−");

/** Seconds of a video as a clock: 1:02:03, 2:03 or, with tenths, 2:03.4. */
export function clock(seconds: number, tenths = false): string {
  const whole = Math.floor(seconds + (tenths ? 1e-6 : 0.5));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (value: number) => String(value).padStart(2, "0");
  const tail = tenths && seconds % 1 >= 0.05 ? `.${Math.floor((seconds % 1) * 10)}` : "";
  return (hours ? `${hours}:${two(minutes)}` : String(minutes)) + `:${two(rest)}${tail}`;
}

export const plural = (count: number, noun: string) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Only pictures that are inside the data may be shown: nothing a run directory says makes the page fetch something. */
export const picture = (uri: string | null) =>
  uri !== null && /^data:image\/(?:png|jpeg|webp);base64,[A-Za-z0-9+/=\s]*$/.test(uri) ? uri : null;
